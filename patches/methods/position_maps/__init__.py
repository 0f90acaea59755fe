"""Position maps: which distance a pair of tokens is rotated by."""
