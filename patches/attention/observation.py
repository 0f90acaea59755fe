"""Looking on while a model attends: an observer is shown what every segment attends with, and changes nothing.

Observing is bound to the thread and to the ``with`` block: forwards of other requests, which run before or after
one's own, are not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch

from patches.attention.layer import Layer
from patches.encoding.recipe import ResolvedRecipe


class Observed(NamedTuple):
    """One segment in one layer, as ``patches.attention.fused.attend`` gets it.

    ``query`` [rows, heads, q, head_dim] stands at positions q_start, q_start + 1, ...; ``key`` [rows, kv_heads, k,
    head_dim] ends at the last of them. ``head`` is how many first keys are followed by a gap, 0 without one.
    """

    query: torch.Tensor
    key: torch.Tensor
    resolved: ResolvedRecipe
    layer: Layer
    q_start: int
    head: int


Observer = Callable[[Observed], None]

observer: ContextVar[Observer | None] = ContextVar("observer", default=None)


@contextmanager
def observing(callback: Observer) -> Iterator[None]:
    """Within it, every attention that this thread computes is shown to ``callback`` first."""
    token = observer.set(callback)
    try:
        yield
    finally:
        observer.reset(token)
