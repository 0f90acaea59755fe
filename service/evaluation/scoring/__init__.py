"""Tokens in, log-probabilities out: forwards in chunks through a cache, and the memory that they need."""
