"""Batches as attention sees them: segments of sequences, and the slots that name their encodings."""
