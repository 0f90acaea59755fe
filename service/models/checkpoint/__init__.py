"""Checkpoints on disk or a hub, read and checked: configuration, weights, adapters, quantization."""
