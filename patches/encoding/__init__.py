"""Positional encodings as values and formulas, independent of any model."""
