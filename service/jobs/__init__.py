"""Evaluations that survive the server: requests, finished units, and the runner."""
