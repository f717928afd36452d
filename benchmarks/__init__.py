"""Measurements: ratios of this project to what people write by hand, taken side by side."""
