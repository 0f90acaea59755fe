"""Position maps: the distances by which pairs of tokens are rotated."""
