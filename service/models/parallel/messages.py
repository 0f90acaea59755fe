"""Messages of the leader to the other ranks. Objects that every rank has are numbers in them."""

from __future__ import annotations

import io
import pickle
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from transformers import Cache
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from patches import AttentionMass, Patched, ResolvedRecipe

NAMED = (Cache, PagedAttentionCache, AttentionMass, Patched)
"""Types whose objects every rank has. In a message they are numbers."""


class NotShared(RuntimeError):
    """A message mentions an object that the other ranks do not have."""


@dataclass(frozen=True)
class Forward:
    """A forward of the model ``patch`` under ``carried``, after its slots have these encodings. ``returns`` is the
    number of the cache that it returns."""

    patch: Patched
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    carried: Mapping[str, Any]
    slots: Mapping[int, ResolvedRecipe]
    inference: bool
    returns: int


@dataclass(frozen=True)
class Apply:
    """``function(*args)``, which returns the object with the number ``returns`` or nothing."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    returns: int


@dataclass(frozen=True)
class Collect:
    """Answer with the observer ``mass``."""

    mass: AttentionMass


Message = Forward | Apply | Collect


@dataclass
class Names:
    """Number -> object, the same numbers on every rank. The leader's objects leave the table when they die."""

    objects: dict[int, Any] = field(default_factory=dict)
    dead: list[int] = field(default_factory=list)
    _number_of: dict[int, int] = field(default_factory=dict)
    _numbers: count[int] = field(default_factory=lambda: count(1))
    _models: count[int] = field(default_factory=lambda: count(-1, -1))

    def next(self) -> int:
        return next(self._numbers)

    def of_model(self, patch: Patched) -> None:
        """Name a model. Every rank names its models in the same order, before any message."""
        number = next(self._models)
        self.objects[number], self._number_of[id(patch)] = patch, number

    def give(self, number: int, value: Any) -> None:
        """Name ``value`` on the leader, which does not keep it alive."""
        if id(value) in self._number_of:
            return  # a cache that was given is returned
        self._number_of[id(value)] = number
        weakref.finalize(value, self._died, id(value), number)

    def _died(self, identity: int, number: int) -> None:
        self._number_of.pop(identity, None)
        self.dead.append(number)

    def has(self, value: Any) -> bool:
        return id(value) in self._number_of

    def number(self, value: Any) -> int:
        """Raises:
        NotShared: for an object without a number.
        """
        try:
            return self._number_of[id(value)]
        except KeyError:
            raise NotShared(f"a {type(value).__name__} that the other ranks do not have") from None


class _Pickler(pickle.Pickler):
    """Tensors travel as their own numbers, without the rest of the memory that they are a view of."""

    def __init__(self, file: io.BytesIO, names: Names) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._names = names

    def persistent_id(self, value: Any) -> int | None:
        return self._names.number(value) if isinstance(value, NAMED) else None

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        numbers = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (numbers, value.dtype, tuple(value.shape), value.device.type)


def _tensor(numbers: bytes, dtype: torch.dtype, shape: tuple[int, ...], device: str) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(numbers), dtype=dtype) if numbers else torch.empty(0, dtype=dtype)
    return flat.reshape(shape).to(device)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, names: Names) -> None:
        super().__init__(file)
        self._names = names

    def persistent_load(self, pid: Any) -> Any:
        return self._names.objects[pid]


def packed(message: Message, names: Names) -> bytes:
    """``message`` with the numbers of objects that died since the last one.

    Raises:
        NotShared: when it mentions an object without a number.
    """
    file = io.BytesIO()
    _Pickler(file, names).dump(message)
    dead, names.dead = names.dead, []
    return pickle.dumps((dead, file.getvalue()))


def unpacked(data: bytes, names: Names) -> Message:
    dead, message = pickle.loads(data)
    for number in dead:
        names.objects.pop(number, None)
    loaded: Message = _Unpickler(io.BytesIO(message), names).load()
    return loaded
