"""Perplexity over the tokens that need a long context (LongPPL)."""
