"""The processes that compute one model together by tensor parallelism (Megatron-LM, arXiv:1909.08053, section 3).

Each rank has some of the attention heads. One rank leads: it alone decides, and the others repeat its forwards and its
changes of caches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from patches.attention.mass import AttentionMass
from patches.model.measuring.geometry import UnsupportedModel, number, text_config

T = TypeVar("T")


class Ranks:
    """One process that computes everything. A leader overrides the methods."""

    size = 1

    def apply(self, function: Callable[..., T], *args: Any) -> T:
        """``function(*args)`` on every rank; it belongs to a module, and changes or returns a cache."""
        return function(*args)

    def created(self, cache: object, build: Callable[..., object], *args: Any) -> None:
        """``cache`` exists here; the other ranks make theirs by ``build(*args)``."""

    def complete(self, mass: AttentionMass) -> AttentionMass:
        """``mass`` with the heads of all ranks."""
        return mass


def heads_of_rank(model: Any, measured: int) -> slice | None:
    """The attention heads that this rank computes, or None for all, when ``measured`` heads reach its attention.

    Raises:
        UnsupportedModel: when that number is neither all heads nor this rank's share.
    """
    size = getattr(model, "tp_size", None) or 1
    if size == 1:
        return None
    declared = number(text_config(model), "num_attention_heads")
    if measured == declared:  # the plan divides other layers only
        return None
    if measured * size != declared:
        raise UnsupportedModel(f"its plan for {size} ranks leaves {measured} of {declared} attention heads to a rank")
    first = int(model._device_mesh["tp"].get_local_rank()) * measured
    return slice(first, first + measured)
