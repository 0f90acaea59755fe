"""Encodings in the syntax of other systems: a module per system, a line each in ``targets``."""
