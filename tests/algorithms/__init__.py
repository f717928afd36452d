"""Tests of the algorithms' floor."""
