"""Rows in, tokens and masks out."""
