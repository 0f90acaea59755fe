"""A packed row of sequences over block tables: one paged attention for all of them in every layer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from importlib.util import find_spec
from operator import or_
from typing import Literal

import torch

from patches.attention.layer import Layer
from patches.attention.paged import eager
from patches.attention.paged.compilation import compiled
from patches.attention.paged.decode import DecodeStep, DecodeTable
from patches.attention.paged.rows import Row, Variant
from patches.attention.paged.step import PagedSequence, Step, step_of
from patches.attention.paged.tables import Pairs, RowTables, power_of_two
from patches.attention.paged.triton import launch
from patches.batch.segments import Batch
from patches.encoding.recipe import ResolvedRecipe

PagedBackend = Literal["triton", "eager"]

Pages = tuple[torch.Tensor, torch.Tensor]
"""Those of the keys and those of the values of a layer, each [pages, size, kv_heads, dim]."""

Role = tuple[str, bool]
"""Layers in which encodings mean the same: the role of their rotation, and whether they have their own whole mask."""

SHORTEST = 1024
"""Least number of tokens for which a row is made: tables of biases have one number per distance."""


def runs_triton(device: torch.device) -> bool:
    """True if the Triton kernel runs on ``device``: CUDA, or the CPU under Triton's interpreter."""
    if find_spec("triton") is None:
        return False
    if device.type == "cuda":
        return True
    from patches.attention.paged.triton import kernel

    return device.type == "cpu" and bool(kernel.INTERPRETED)


class ModelRows:
    """The rows of one model by slot: tables for every role of a layer and number of heads.

    Slots are written when a step needs them, by the thread that computes it.
    """

    def __init__(self, recipe: Callable[[Role, int], ResolvedRecipe], pairs: Pairs) -> None:
        """``recipe`` gives the encoding of a slot in layers of a role; ``pairs`` are those of layers that rotate."""
        self.recipe, self._pairs = recipe, pairs
        self._tables: dict[tuple[Role, int], RowTables] = {}
        self._compiled: dict[tuple[Role, int], tuple[ResolvedRecipe, int, Row]] = {}

    def tables(self, role: Role, heads: int, longest: Mapping[int, int], device: torch.device) -> RowTables:
        """The tables of layers with a role and ``heads`` query heads, for the slots and the tokens of ``longest``.

        Raises:
            DoesNotFit: for an encoding without a row.
        """
        found = self._tables.get((role, heads))
        if found is None:
            pairs = self._pairs if role[0] == "slots" else Pairs()
            with torch.inference_mode(False):  # they outlive the engine whose step asks first
                found = self._tables[role, heads] = RowTables(heads, pairs, device)
        found.write({slot: self._row(role, slot, tokens) for slot, tokens in longest.items()})
        return found

    def write(self, longest: Mapping[int, int]) -> None:
        """Have the slots and the tokens of ``longest`` in all tables: a replayed graph reads them."""
        for (role, heads), tables in self._tables.items():
            self.tables(role, heads, longest, tables.slots.device)

    def variant(self, slots: Iterable[int]) -> Variant:
        """Parts of the kernel that ``slots`` need, in the layers that have attended so far."""
        own = (variant for tables in self._tables.values() for variant in tables.variants(slots))
        return reduce(or_, own, Variant.PLAIN)

    def key(self, slots: Iterable[int]) -> Hashable:
        """The part of a captured graph that tables decide: addresses, and the variants of the kernel."""
        return tuple((key, tables.version, tables.variants(slots)) for key, tables in self._tables.items())

    def _row(self, role: Role, slot: int, tokens: int) -> Row:
        resolved, known = self.recipe(role, slot), self._compiled.get((role, slot))
        if known is None or known[0] is not resolved or known[1] < tokens:
            length = power_of_two(tokens, SHORTEST)
            known = self._compiled[role, slot] = (resolved, length, compiled(resolved, length))
        return known[2]


@dataclass
class PagedBatch(Batch):
    """``steps`` have the sequences; there are no segments. Keys and queries are written under the base of their row.

    Each of ``steps`` is the same one on other block tables, by the number of a group of layers.
    """

    steps: Sequence[Step | DecodeTable] = field(kw_only=True)
    backend: PagedBackend = field(kw_only=True)

    @property
    def longest(self) -> Mapping[int, int]:
        """Tokens of the longest sequence of every slot."""
        return self.steps[0].longest

    @property
    def slots(self) -> Collection[int]:
        return self.longest.keys()

    @property
    def is_static(self) -> bool:
        return isinstance(self.steps[0], DecodeTable)

    def write(self, key: torch.Tensor, value: torch.Tensor, pages: Pages, group: int = 0) -> None:
        """Put the new states [tokens, kv_heads, dim] into pages [pages, size, kv_heads, dim] of a group of layers."""
        step, (key_pages, value_pages) = self.steps[group], pages
        if self.backend == "triton" and key.dtype == key_pages.dtype and key.stride(2) == value.stride(2) == 1:
            launch.write(key, value, key_pages, value_pages, step.new_places)
            return
        key_pages.index_put_(step.new_places, key)
        value_pages.index_put_(step.new_places, value)

    def attend(
        self,
        query: torch.Tensor,
        pages: Pages,
        layer: Layer,
        role: Role,
        rows: ModelRows,
        group: int = 0,
    ) -> torch.Tensor:
        """Attention output [tokens, heads, value dim] in the dtype of ``query``.

        ``query`` is [tokens, heads, head_dim], and pages are [pages, size, kv_heads, dim] of a group of layers.

        Raises:
            DoesNotFit: for a layer or an encoding without a row.
        """
        step, (key_pages, value_pages) = self.steps[group], pages
        heads, kv_heads, dim = query.shape[1], key_pages.shape[2], query.shape[2]
        tables = self.shared(("rows", role, heads), lambda: rows.tables(role, heads, self.longest, query.device))
        if self.backend == "eager":
            assert isinstance(step, Step), "the specification is not captured"
            return eager.attend(query, key_pages, value_pages, step, tables.rows, layer)

        def make() -> launch.Plan:
            return launch.planned(step, tables, heads, kv_heads, launch.blocks_for(query.dtype, dim, query.device))

        plan = self.shared(("plan", role, heads, kv_heads, dim, group), make)
        return launch.attend(query, key_pages, value_pages, plan, layer)


def paged_batch(
    groups: Sequence[Sequence[PagedSequence]], page_size: int, device: torch.device, backend: PagedBackend
) -> PagedBatch:
    """The batch of sequences one after another in a packed row, with their pages in each of ``groups`` of layers.

    Raises:
        ValueError: as ``step_of``.
    """
    first = step_of(groups[0], page_size, device)
    steps = [first, *(first.on(sequences) for sequences in groups[1:])]
    return PagedBatch([], packed=True, steps=steps, backend=backend)


def decode_batch(step: DecodeStep) -> PagedBatch:
    """The batch of one forward of ``step``: what a forward computes for all its layers must not outlive it."""
    return PagedBatch([], packed=True, steps=step.tables, backend="triton")
