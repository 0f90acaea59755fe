"""Attention of one segment: ``reference`` is the specification, ``fused`` is what serves."""
