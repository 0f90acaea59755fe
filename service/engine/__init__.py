"""The engine: admission, continuous batching through one adapter, sampling, streaming."""

THREAD_NAME = "ropeway-engine"
"""The name of every generation thread."""

FORCED = 128
"""Exit codes of a process that a signal ended are this and the signal's number, as shells count."""

SWITCH_S = 0.0005
"""Seconds between switches of the interpreter. A generation step needs it hundreds of times, and each time waits this
long for another Python thread."""
