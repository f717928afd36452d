"""Algorithms that TRL trains, in this process: what they share."""
