"""Served models: loading a checkpoint, the table of what is served, the embedded demo models."""
