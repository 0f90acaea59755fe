"""Biases: terms of a score that depend on distance."""
