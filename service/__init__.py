"""The service: HTTP API, engine and evaluation over the encodings in ``patches``."""
