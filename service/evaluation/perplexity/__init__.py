"""Perplexity against context length."""
