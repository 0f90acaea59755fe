"""Retrieval from a long context: passkey and needle in a haystack."""
