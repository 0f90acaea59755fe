"""One encoding for a model and a length, with the evidence for it."""
