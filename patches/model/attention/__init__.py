"""The attention of a patched model's layers, segment by segment."""
