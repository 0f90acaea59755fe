"""The paged cache, its blocks and its memory."""
