"""Biases: what a distance adds to a score."""
