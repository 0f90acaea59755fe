"""Encodings chosen by a keyword argument of a patched model's ``forward``.

transformers' ``generate`` passes such an argument to every forward. It repeats tensors for beams and for
``num_return_sequences``. So the encoding of a row is a number in a tensor, and a slot is in use only during a forward.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch

from patches.batch.slots import MAX_POSITION, SlotTable, decode, encode
from patches.encoding.method import Method
from patches.encoding.recipe import ResolvedRecipe
from patches.parsing import parse

KEYWORD = "position_encoding"
"""Name of the keyword argument."""

Encoding: TypeAlias = str | Mapping[str, Any] | Method
"""A short form such as ``"yarn:4"``, request fields, or a parsed method."""

_numbers = itertools.count(1)
"""Numbers are unique in the process, so a patched model refuses those of another one."""


class ChosenEncodings:
    """The encodings that users of one patched model chose, by number."""

    def __init__(self) -> None:
        self._number_of: dict[tuple[ResolvedRecipe, int | None], int] = {}
        self._resolved: dict[int, ResolvedRecipe] = {}

    def number(self, resolved: ResolvedRecipe) -> int:
        """The number of ``resolved``; equal encodings of one reserved length share it."""
        key = resolved, resolved.length
        if key not in self._number_of:
            self._number_of[key] = number = next(_numbers)
            self._resolved[number] = resolved
        return self._number_of[key]

    @contextmanager
    def encoded(
        self, position_ids: torch.Tensor, chosen: int | torch.Tensor, rows: int, slots: SlotTable
    ) -> Iterator[torch.Tensor]:
        """``position_ids`` [rows or 1, new tokens] with the slots of ``chosen``, a number or one per row [rows].

        The encodings occupy ``slots`` until the context ends.

        Raises:
            ValueError: for an unknown number, another number of rows, or a position past a reserved length.
            SlotsExhausted: when 128 different encodings are in use.
        """
        position = decode(position_ids)[0]
        every = [self._known(number) for number in (chosen.tolist() if isinstance(chosen, torch.Tensor) else [chosen])]
        if isinstance(chosen, torch.Tensor) and len(every) != rows:
            raise ValueError(f"{KEYWORD}: {len(every)} encodings for {rows} rows; give one encoding, or one per row")
        _refuse_positions_past_reserved_lengths(position, every)
        with ExitStack() as held:
            slot_of = {}
            for resolved in set(every):
                slot_of[resolved] = slots.acquire(resolved)
                held.callback(slots.release, slot_of[resolved])
            column = torch.tensor([slot_of[resolved] for resolved in every], device=position.device)[:, None]
            yield encode(position, column)

    def _known(self, number: object) -> ResolvedRecipe:
        if not isinstance(number, int) or number not in self._resolved:
            raise ValueError(f"{KEYWORD}: {number!r} is no encoding of this patched model; pass **encoding(...)")
        return self._resolved[number]


def _refuse_positions_past_reserved_lengths(position: torch.Tensor, every: list[ResolvedRecipe]) -> None:
    if all(resolved.length is None for resolved in every):
        return  # the host reads no position back
    reserved = torch.tensor([resolved.length or MAX_POSITION for resolved in every])
    past = position[:, -1].cpu() >= reserved
    if past.any():
        row = int(past.long().argmax())
        longest, length = int(position[:, -1].max()) + 1, int(reserved.expand(len(past))[row])
        raise ValueError(f"length: {longest} tokens, but the encoding of row {row} reserved {length}")


def by_row(
    encodings: Encoding | Sequence[Encoding], length: int | Sequence[int] | None
) -> list[tuple[Method, int | None]]:
    """(method, reserved length in tokens) of each row, or one pair for every row.

    Raises:
        ValueError: when the numbers of encodings and of lengths differ, or a length is out of range.
        InvalidEncoding: when an encoding cannot be parsed.
    """
    given = [encodings] if isinstance(encodings, str | Mapping | Method) else list(encodings)
    methods = [parse(encoding) for encoding in given]
    lengths = list(length) if isinstance(length, Sequence) else [length]
    rows = max(len(methods), len(lengths))
    if {len(methods), len(lengths)} - {1, rows}:
        raise ValueError(f"length: {len(lengths)} lengths for {len(methods)} encodings; give one, or one per encoding")
    for value in lengths:
        if value is not None and not 1 <= value <= MAX_POSITION:
            raise ValueError(f"length: {value} is not between 1 and {MAX_POSITION} tokens")
    return list(zip(methods * (rows // len(methods)), lengths * (rows // len(lengths)), strict=True))


def with_keyword(forward: Callable[..., Any]) -> inspect.Signature:
    """The signature of ``forward`` with the keyword argument: ``generate`` and trainers check names against it."""
    signature = inspect.signature(forward)
    given = list(signature.parameters.values())
    last = len(given) - any(one.kind is one.VAR_KEYWORD for one in given)
    given.insert(last, inspect.Parameter(KEYWORD, inspect.Parameter.KEYWORD_ONLY, default=None))
    return signature.replace(parameters=given)
