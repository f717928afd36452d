"""Scores for what a model said."""
