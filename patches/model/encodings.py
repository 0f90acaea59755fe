"""The encodings of a patched model, resolved, in slots, and chosen by a keyword argument of ``forward``.

transformers' ``generate`` passes such an argument to every forward. It repeats tensors for beams and for
``num_return_sequences``. So the encoding of a row is a number in a tensor. Its slot is in use only during a forward.
"""

from __future__ import annotations

import inspect
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from operator import index
from typing import Any, SupportsIndex, TypeAlias

import torch

from patches.attention.paged.compilation import DoesNotFit, base_of, compiled
from patches.batch.slots import MAX_POSITION, SlotTable, encode, positions_of
from patches.encoding.geometry import RopeGeometry
from patches.encoding.method import Method
from patches.encoding.recipe import ResolvedRecipe
from patches.parsing import parse
from patches.resolution import confirmed, describe, resolve
from patches.rope_parameters import is_by_layer

KEYWORD = "position_encoding"
"""Name of the keyword argument."""

Encoding: TypeAlias = str | Mapping[str, Any] | Method
"""A short form such as ``"yarn:4"``, request fields, or a parsed method."""

KEPT = 4096
"""Encodings whose numbers a patched model knows: those that were used last."""

_numbers = itertools.count(1)
_PROCESS_BIT = 32
"""Numbers are unique, with their process in the bits from this one on. So a patched model refuses those of others."""


class Encodings:
    """The encodings of one model: their numbers for a reserved length, and the slots of those in use."""

    def __init__(
        self, geometry: RopeGeometry, layers: Mapping[str, int], device: torch.device, declared: object = None
    ) -> None:
        """``layers`` counts the layers by role: under the encoding, with another rotary type, without rotation. Those
        with a temperature of the model count again.

        ``declared`` is ``rope_parameters`` of the configuration. It may have an object per type of layer.
        """
        self.geometry, self.layers, self._declared = geometry, dict(layers), declared
        native = self.resolve(parse({"method": "default"}), geometry.original_max_position_embeddings)
        self.slots = SlotTable(native, geometry.rotary_dim, device, base_of)
        self._number_of: dict[tuple[ResolvedRecipe, int | None], int] = {}
        self._resolved: dict[int, ResolvedRecipe] = {}  # the longest unused first
        self._lock = threading.Lock()

    def encoding(
        self, encodings: Encoding | Iterable[Encoding], length: SupportsIndex | Iterable[SupportsIndex] | None = None
    ) -> dict[str, Any]:
        """Keyword arguments that choose the encoding of every row, or of each: ``model.generate(..., **encoding(e))``.

        An encoding is a short form such as ``"yarn:4"``, a mapping or a method. A list has one for each row. ``length``
        is the reserved length, prompt and new tokens, or one for each row. Encodings that depend on it need it, and
        their rows end there. Others take any.

        Raises:
            ValueError: naming a parameter that does not fit the model, a missing length, or one out of range.
            InvalidEncoding: when an encoding cannot be parsed.
        """
        rows = by_row(encodings, length, self.parsed)
        numbers = [self._number(self._reserved(method, tokens)) for method, tokens in rows]
        return {KEYWORD: numbers[0] if _is_one(encodings) and not _has_entries(length) else torch.tensor(numbers)}

    def parsed(self, encoding: Encoding) -> Method:
        """The method of ``encoding``. The checkpoint's own ``rope_parameters`` by type of layer are its ``default``.

        Raises:
            InvalidEncoding: when it cannot be parsed.
        """
        if isinstance(encoding, Mapping) and encoding == self._declared and is_by_layer(encoding):
            return parse({"method": "default"})
        return parse(encoding)

    def _reserved(self, method: Method, length: int | None) -> ResolvedRecipe:
        resolved = self.resolve(method, length or self.geometry.original_max_position_embeddings)
        if length is None and resolved.length is not None:
            raise ValueError(f"length: {method.method} depends on the reserved length; give prompt + max_new_tokens")
        return resolved

    def _number(self, resolved: ResolvedRecipe) -> int:
        """Equal encodings of one reserved length share a number, until ``KEPT`` others have been used since."""
        key = resolved, resolved.length
        with self._lock:
            number = self._number_of.setdefault(key, (os.getpid() << _PROCESS_BIT) + next(_numbers))
            self._resolved[number] = self._resolved.pop(number, resolved)
            if len(self._resolved) > KEPT:
                oldest = self._resolved.pop(next(iter(self._resolved)))
                del self._number_of[oldest, oldest.length]
            return number

    def resolve(self, encoding: Encoding, length: int) -> ResolvedRecipe:
        """Numbers of an encoding for this model and a reserved length of ``length`` tokens.

        Raises:
            ValueError: naming a parameter that does not fit the model, or a part that the attention cannot compute.
        """
        method = self.confirmed(self.parsed(encoding), length)
        resolved = resolve(method, self.geometry, length)
        try:
            _check_rows(resolved)
        except DoesNotFit as error:
            raise ValueError(f"method: {method.method}: {error}") from error
        return resolved

    def confirmed(self, method: Method, length: int) -> Method:
        """``method`` without the numbers that its request expects to follow, once they have been compared.

        Raises:
            EchoMismatch: naming the first number that differs.
        """
        return confirmed(method, self.geometry, length, self.layers) if method.follows else method

    def describe(self, encoding: Encoding, length: int) -> dict[str, Any]:
        """The echo of an encoding for this model and a reserved length of ``length`` tokens."""
        return describe(self.parsed(encoding), self.geometry, length, self.layers)

    def forget_encodings(self) -> None:
        """Empty the table of slots; none may be in use."""
        self.slots.clear()

    @contextmanager
    def encoded(
        self, position_ids: torch.Tensor, chosen: int | torch.Tensor | None, rows: int
    ) -> Iterator[torch.Tensor]:
        """``position_ids`` [rows or 1, new tokens] with the slots of ``chosen``: a number, one per row [rows] or None.

        The encodings occupy their slots until the context ends. None leaves the slots that the positions have.

        Raises:
            ValueError: for an unknown number, another number of rows, or a position past a reserved length.
            SlotsExhausted: when 128 different encodings are in use.
        """
        if chosen is None:
            yield position_ids
            return
        position, every = positions_of(position_ids), self._every(chosen)
        if isinstance(chosen, torch.Tensor) and len(every) != rows:
            raise ValueError(
                f"{KEYWORD}: {len(every)} encodings for {rows} rows; give one without a list, or one per row"
            )
        if (different := len(set(every) - {self.slots[0]})) > self.slots.capacity:
            most = self.slots.capacity
            raise ValueError(
                f"{KEYWORD}: {different} different encodings; a batch has {most} beside the default at most"
            )
        _refuse_positions_past_reserved_lengths(position, every)
        with ExitStack() as held:
            slot_of = {resolved: held.enter_context(self.slots.held(resolved)) for resolved in set(every)}
            column = torch.tensor([slot_of[resolved] for resolved in every], device=position.device)[:, None]
            yield encode(position, column)

    @contextmanager
    def encoded_by_length(self, position_ids: torch.Tensor) -> Iterator[torch.Tensor]:
        """Encoded ``position_ids`` [rows or 1, new tokens], with the checkpoint's own encoding at their length.

        Some checkpoints declare frequencies that depend on the length: transformers takes the largest position of a
        forward. So tokens of slot 0 have those of that length, in a slot that is in use until the context ends.

        Raises:
            SlotsExhausted: when 128 different encodings are in use.
        """
        own = self.slots[0]
        if own.length is None:
            yield position_ids
            return
        is_own = position_ids <= MAX_POSITION
        length = int(position_ids.masked_fill(~is_own, 0).max()) + 1
        if length <= own.length:
            yield position_ids
            return
        with self.slots.held(self.resolve("default", length)) as slot:
            yield torch.where(is_own, encode(position_ids, slot), position_ids)

    def recipes(self, chosen: int | torch.Tensor | None, rows: int) -> tuple[ResolvedRecipe, ...]:
        """The encoding of each of ``rows`` by ``chosen``, as in ``encoded``; None is the model's own.

        Raises:
            ValueError: for an unknown number.
        """
        every = [self.slots[0]] if chosen is None else self._every(chosen)
        return tuple(every if isinstance(chosen, torch.Tensor) else every * rows)

    def _every(self, chosen: int | torch.Tensor) -> list[ResolvedRecipe]:
        return [self._known(number) for number in (chosen.tolist() if isinstance(chosen, torch.Tensor) else [chosen])]

    def _known(self, number: object) -> ResolvedRecipe:
        with self._lock:
            resolved = self._resolved.pop(number, None) if isinstance(number, int) else None
            if resolved is None and isinstance(number, int) and number >> _PROCESS_BIT not in (0, os.getpid()):
                raise ValueError(
                    f"{KEYWORD}: {number} was made in another process, such as a data loader's worker; call encoding "
                    "where the model runs"
                )
            if resolved is None:
                raise ValueError(f"{KEYWORD}: {number!r} is no encoding of this patched model; pass **encoding(...)")
            self._resolved[number] = resolved  # type: ignore[index]
            return resolved


@lru_cache(1024)
def _check_rows(resolved: ResolvedRecipe) -> None:
    """Raises:
    DoesNotFit: for a part without a row of numbers, which would fail in a step. Relative scores need none.
    """
    if resolved.recipe.relative is None:
        compiled(resolved, 1)


def _refuse_positions_past_reserved_lengths(position: torch.Tensor, every: list[ResolvedRecipe]) -> None:
    if all(resolved.length is None for resolved in every):
        return  # the host reads no position back
    reserved = torch.tensor([resolved.length or MAX_POSITION for resolved in every])
    largest = position.amax(1).cpu()
    past = largest >= reserved
    if past.any():
        row = int(past.long().argmax())
        last, length = (int(each.expand(len(past))[row]) for each in (largest, reserved))
        raise ValueError(f"length: {last + 1} tokens, but the encoding of row {row} reserved {length}")


def by_row(
    encodings: Encoding | Iterable[Encoding],
    length: SupportsIndex | Iterable[SupportsIndex] | None,
    parsed: Callable[[Encoding], Method],
) -> list[tuple[Method, int | None]]:
    """(method, reserved length in tokens) of each row, or one pair for every row.

    Raises:
        ValueError: when the numbers of encodings and of lengths differ, or a length is out of range.
        InvalidEncoding: when an encoding cannot be parsed.
    """
    if not _is_one(encodings) and not isinstance(encodings, Iterable):
        raise ValueError(f"encodings: {encodings!r} is no encoding, nor a list of them")
    given: list[Any] = [encodings] if _is_one(encodings) else list(encodings)
    if not given:
        raise ValueError("encodings: an empty list; give one encoding, or one per row")
    methods = [parsed(encoding) for encoding in given]
    lengths = [None] if length is None else _tokens(length)
    rows = max(len(methods), len(lengths))
    if {len(methods), len(lengths)} - {1, rows}:
        raise ValueError(f"length: {len(lengths)} lengths for {len(methods)} encodings; give one, or one per encoding")
    for value in lengths:
        if value is not None and not 1 <= value <= MAX_POSITION:
            raise ValueError(f"length: {value} is not between 1 and {MAX_POSITION} tokens")
    return list(zip(methods * (rows // len(methods)), lengths * (rows // len(lengths)), strict=True))


def _is_one(encodings: Encoding | Iterable[Encoding]) -> bool:
    return isinstance(encodings, str | Mapping | Method)


def _has_entries(length: object) -> bool:
    """True for one length per row, False for one for all of them."""
    return isinstance(length, Iterable) and not isinstance(length, str) and getattr(length, "ndim", 1) > 0


def _tokens(length: Any) -> list[int | None]:
    """One length or several, of any type of integers.

    Raises:
        ValueError: for anything else.
    """
    try:
        return [index(value) for value in (length if _has_entries(length) else [length])]
    except TypeError:
        raise ValueError(f"length: {length!r} is no number of tokens, nor one for each encoding") from None


def with_keyword(forward: Callable[..., Any]) -> inspect.Signature:
    """The signature of ``forward`` with the keyword argument: ``generate`` and trainers check names against it."""
    signature = inspect.signature(forward)
    given = list(signature.parameters.values())
    last = len(given) - any(one.kind is one.VAR_KEYWORD for one in given)
    given.insert(last, inspect.Parameter(KEYWORD, inspect.Parameter.KEYWORD_ONLY, default=None))
    return signature.replace(parameters=given)
