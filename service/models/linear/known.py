"""Choices of products that hold: those of earlier starts, so that a restarted server rounds as before.

Choices are timed, and other processes disturb times. An evaluation that goes on after a restart would have two
roundings otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch

from service.machine.cpus import processor
from service.models.linear.packing import by_packed, by_sums
from service.models.linear.products import Product, by_columns, by_groups, by_onednn, plain

PRODUCTS: dict[str, Product] = {
    product.__name__: product for product in (plain, by_onednn, by_columns, by_groups, by_packed, by_sums)
}

Choice = tuple[tuple[int, Product], ...]
"""(rows up to which it is taken, product), in order; the last is unbounded."""


class Kind(NamedTuple):
    """Layers that have the same choices."""

    products: tuple[Product, ...]
    shape: torch.Size | None
    dtype: torch.dtype
    threads: int

    @property
    def name(self) -> str:
        """JSON that no other kind has, and no other processor, version of torch, or set of products."""
        products = [product.__name__ for product in self.products]
        shape = None if self.shape is None else list(self.shape)
        here = [processor(), torch.__version__, sorted(PRODUCTS)]
        return json.dumps([*here, self.threads, str(self.dtype), shape, products])


class Choices(NamedTuple):
    """The fastest products by plain weights, and by packed weights unless those are slower."""

    plain: Choice
    packed: Choice | None


class Memory(Protocol):
    """Choices by the names of kinds, in JSON, that several processes have."""

    def read(self, names: Collection[str]) -> dict[str, Any]:
        """The choices for those of ``names`` that are kept."""

    def keep(self, choices: Mapping[str, Any]) -> dict[str, Any]:
        """Keep choices; returns those that hold, since another process may have been quicker."""


_memory: ContextVar[Memory | None] = ContextVar("memory", default=None)
_settled: dict[Kind, Choices] = {}
"""In this process. Layers that an adapter changed have those of its base."""


@contextmanager
def kept_in(memory: Memory) -> Iterator[None]:
    """Within the block, choices hold that ``memory`` has, and it keeps new ones."""
    token = _memory.set(memory)
    try:
        yield
    finally:
        _memory.reset(token)


def known(kinds: Collection[Kind]) -> dict[Kind, Choices]:
    """The choices that need not be timed."""
    memory = _memory.get()
    kept = {} if memory is None else memory.read([kind.name for kind in kinds])
    found = {kind: _settled[kind] for kind in kinds if kind in _settled}
    return found | {kind: _of_json(kept[kind.name]) for kind in kinds if kind.name in kept}


def settled(choices: Mapping[Kind, Choices]) -> dict[Kind, Choices]:
    """Choices of a model's layers, known or timed now, as they hold from here on."""
    memory = _memory.get()
    if memory is None:
        held = dict(choices)
    else:
        kept = memory.keep({kind.name: _in_json(choice) for kind, choice in choices.items()})
        held = {kind: _of_json(kept[kind.name]) for kind in choices}
    _settled.update(held)
    return held


def _in_json(choices: Choices) -> dict[str, Any]:
    return {
        of: None if choice is None else [[most, product.__name__] for most, product in choice]
        for of, choice in choices._asdict().items()
    }


def _of_json(kept: Mapping[str, Any]) -> Choices:
    packed = kept["packed"]
    return Choices(_choice(kept["plain"]), None if packed is None else _choice(packed))


def _choice(kept: list[tuple[int, str]]) -> Choice:
    return tuple((most, PRODUCTS[name]) for most, name in kept)
