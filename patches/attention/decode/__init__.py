"""Attention of one new query of each sequence, in ordinary caches: alone, or several sequences in one call."""
