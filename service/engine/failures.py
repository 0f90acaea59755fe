"""Failures of the engine that are not the request's fault."""

from __future__ import annotations


class EngineFailed(RuntimeError):
    """The generation thread died or stalled under this request; it is being replaced."""


class EngineStopping(EngineFailed):
    """The server is shutting down."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")
