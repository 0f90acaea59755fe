"""Routes about encodings: which there are, their pictures, their exports, and the choice of ``auto``."""
