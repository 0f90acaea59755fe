"""Caches of several sequences as one cache of several rows, and back.

Keys and values are padded on the left, so that the newest tokens of all rows are in one column. Other states have a
fixed size per row. Layers are those of ``transformers.DynamicCache``: ``keys`` and ``values`` are [rows, heads, tokens,
dim], and lists and dicts contain other states [rows, ...].
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

BY_TOKEN = ("keys", "values", "indexer_keys")
COUNT = "cumulative_length"
"""Tokens that a sliding layer has seen."""


class CannotJoin(RuntimeError):
    """The cache of this model has a state of unknown shape, so its rows cannot share a batch."""


def joined(caches: Sequence[Any]) -> Any:
    """One cache of the rows of ``caches``. Of one cache it is a copy, which forwards through the original leave alone.

    Raises:
        CannotJoin: when a layer has a state of unknown kind.
    """
    _check(caches[0])

    def tensor(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
        if name not in BY_TOKEN:
            return torch.cat(parts)
        if len(parts) == 1:
            return parts[0]  # caches replace keys and values, and change other states in place
        width = max(part.shape[-2] for part in parts)
        return torch.cat([torch.nn.functional.pad(part, (0, 0, width - part.shape[-2], 0)) for part in parts])

    return _mapped("", list(caches), tensor, max)


def row_of(cache: Any, row: int, num_tokens: int) -> Any:
    """The cache of one row of a joined cache, which has seen ``num_tokens`` tokens."""

    def tensor(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
        part = parts[0][row : row + 1]
        if name in BY_TOKEN:
            part = part[..., max(0, part.shape[-2] - num_tokens) :, :]
        return part.clone()  # a view would keep all rows in memory

    return _mapped("", [cache], tensor, lambda counts: min(counts[0], num_tokens))


def sizes(cache: Any) -> tuple[int, int]:
    """(bytes of keys and values, bytes of states whose size does not depend on the number of tokens)."""
    by_token, by_row = [0], [0]

    def tensor(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
        (by_token if name in BY_TOKEN else by_row).append(parts[0].nbytes)
        return parts[0]

    _mapped("", [cache], tensor, max)
    return sum(by_token), sum(by_row)


def _check(cache: Any) -> None:
    for layer in cache.layers:
        for name, value in vars(layer).items():
            if name not in BY_TOKEN and not _is_by_row(value):
                raise CannotJoin(f"a {type(layer).__name__} has {name}")


def _is_by_row(value: object) -> bool:
    """True for a constant, and for a list or dict of constants and of tensors [rows, ...]."""
    if isinstance(value, dict | list):
        every = value.values() if isinstance(value, dict) else value
        return all(isinstance(each, torch.Tensor | _CONSTANTS) for each in every)
    return isinstance(value, _CONSTANTS) or (isinstance(value, torch.Tensor) and not value.ndim)


_CONSTANTS = bool | int | float | str | torch.dtype | torch.device | type | None


def _mapped(
    name: str,
    parts: list[Any],
    tensor: Callable[[str, list[torch.Tensor]], torch.Tensor],
    count: Callable[[list[int]], int],
) -> Any:
    """A copy of ``parts[0]`` with every state replaced by ``tensor(name, the states of all parts)``."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return tensor(name, parts) if first.ndim else first
    if isinstance(first, dict):
        return {key: _mapped(name, [part[key] for part in parts], tensor, count) for key in first}
    if isinstance(first, list):
        return [_mapped(name, list(each), tensor, count) for each in zip(*parts, strict=True)]
    if name == COUNT:
        return count(parts)
    if name not in ("", "layers"):
        return first
    whole = copy.copy(first)
    for attribute in vars(first):
        vars(whole)[attribute] = _mapped(attribute, [vars(part)[attribute] for part in parts], tensor, count)
    return whole
