"""The engine: admission, continuous batching through one adapter, sampling, streaming."""

THREAD_NAME = "ropeway-engine"
"""The name of every generation thread."""
