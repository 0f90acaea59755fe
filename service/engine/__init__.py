"""The engine: admission, continuous batching through one adapter, sampling, streaming."""
