"""Gradient checkpointing: the backward pass runs layers again, each in a forward of its encodings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import nn

_FUNCTION = "_gradient_checkpointing_func"
"""transformers' attribute of a layer: it is called with the layer's forward and its arguments."""


@contextmanager
def reopening(model: nn.Module, opened: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Within it, layers of ``model`` under gradient checkpointing run again within ``opened()``."""
    own = {
        layer: getattr(layer, _FUNCTION)
        for layer in model.modules()
        if getattr(layer, "gradient_checkpointing", False) and hasattr(layer, _FUNCTION)
    }
    for layer, function in own.items():
        setattr(layer, _FUNCTION, partial(_checkpointed, function, opened))
    try:
        yield
    finally:
        for layer, function in own.items():
            setattr(layer, _FUNCTION, function)


def _checkpointed(
    function: Callable[..., Any],
    opened: Callable[[], AbstractContextManager[None]],
    layer: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    def run(*inputs: Any, **options: Any) -> Any:
        with opened():
            return layer(*inputs, **options)

    return function(run, *args, **kwargs)
