"""Norms, rotations and gated products as one kernel each, in steps whose attention is a Triton kernel too."""
