"""A loaded model, measured on its own forward: geometry, rotation, cache and rounding."""
