"""A search for the factors of each rotary pair at one length (LongRoPE, arXiv:2402.13753)."""
