"""Policies: encodings by reserved length, in requests and in files."""
