"""Forwards as lists of their calls."""
