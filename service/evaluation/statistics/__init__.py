"""Scores and their intervals, from numbers per token or per case."""
