"""RULER's synthetic tasks: retrieval, tracing and counting at any length (Hsieh et al., arXiv:2404.06654)."""
