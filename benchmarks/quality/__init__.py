"""Results of scores: tables of methods, and equality with plain transformers."""
