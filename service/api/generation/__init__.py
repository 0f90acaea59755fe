"""Prompts from a request to the engine, and its tokens as text."""
