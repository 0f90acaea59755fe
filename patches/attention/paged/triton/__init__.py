"""Paged attention in Triton: the kernel, and its launches in a step."""
