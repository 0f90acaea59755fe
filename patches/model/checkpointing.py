"""Gradient checkpointing: the backward pass runs layers again, each in a forward of its encodings."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from patches.model.forward import Forwards

_FUNCTION = "_gradient_checkpointing_func"
"""transformers' attribute of a layer: it is called with the layer's forward and its arguments."""


class Checkpointing:
    """The layers of one model under gradient checkpointing, replaced while forwards run on any thread."""

    def __init__(self, forwards: Forwards) -> None:
        self._forwards, self._lock, self._running = forwards, threading.Lock(), 0
        self._own: dict[nn.Module, Callable[..., Any]] = {}

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Within it, layers of ``model`` that run again do so in ``reopened()`` of the forward that ran them first."""
        with self._lock:
            self._running += 1
            if self._running == 1:
                self._own = {layer: getattr(layer, _FUNCTION) for layer in model.modules() if hasattr(layer, _FUNCTION)}
                for layer, function in self._own.items():
                    setattr(layer, _FUNCTION, partial(self._checkpointed, function))
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    for layer, function in self._own.items():
                        setattr(layer, _FUNCTION, function)

    def _checkpointed(self, function: Callable[..., Any], layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        reopened = self._forwards.current.reopened
        assert reopened is not None, "a forward in training has it"

        def run(*inputs: Any, **options: Any) -> Any:
            with reopened():
                return layer(*inputs, **options)

        return function(run, *args, **kwargs)
