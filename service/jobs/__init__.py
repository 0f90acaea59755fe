"""Evaluations that survive the server: what is asked, what is finished, and who works on it."""
