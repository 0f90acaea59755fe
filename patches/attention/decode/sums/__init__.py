"""Scores and outputs of all sequences of a step in two calls: float32 on a CPU."""
