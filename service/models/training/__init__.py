"""Training of the embedded demo models: a RoPE model and its variants, equal in all but the encoding."""
