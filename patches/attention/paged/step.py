"""The sequences of one step: their encodings, their new tokens, and the pages of their caches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from patches.batch.upload import uploaded
from patches.encoding.positions import NO_LIMIT

SPLIT = 128
"""Keys of one part of a single new token, in a short sequence."""


@dataclass(frozen=True)
class PagedSequence:
    """``queries`` new tokens at positions q_start, q_start + 1, ..., whose keys are the last of the sequence.

    ``pages`` are the physical pages of its cache in the order of positions. If keys were evicted, the pages
    ``first_pages`` .. first_pages + evicted_pages - 1 of the sequence are missing there.
    """

    slot: int
    q_start: int
    queries: int
    pages: tuple[int, ...]
    first_pages: int = 0
    evicted_pages: int = 0

    @property
    def q_stop(self) -> int:
        return self.q_start + self.queries

    def kv_idx(self, page_size: int) -> torch.Tensor:
        """Positions int64 [k] of all keys that the cache still has."""
        gap = min(self.first_pages * page_size, self.q_stop)
        return torch.cat((torch.arange(gap), torch.arange(gap + self.evicted_pages * page_size, self.q_stop)))


@dataclass(frozen=True)
class Work:
    """Tensors that divide a step among the programs of a kernel, int32.

    ``sequences`` [n, 6]: slot, first position, first token, new tokens, pages before the gap, evicted pages.
    ``chunks`` [items, 4] are the work items of sequences with several new tokens. ``singles`` [items, 4] are those with
    one, and ``edges`` [singles + 1] are the first items of each. An item has its sequence, its first query, and a range
    of keys [low, high).
    """

    sequences: torch.Tensor
    chunks: torch.Tensor
    singles: torch.Tensor
    edges: torch.Tensor


def about(sequences: Sequence[PagedSequence]) -> np.ndarray:
    """``Work.sequences``."""
    rows, token = list[tuple[int, ...]](), 0
    for s in sequences:
        rows.append((s.slot, s.q_start, token, s.queries, s.first_pages, s.evicted_pages))
        token += s.queries
    return np.array(rows, np.int32)


def parts_of(keys: np.ndarray, gaps: np.ndarray, split: int) -> np.ndarray:
    """int64 [n, 4] of sequences with ``keys`` int [n], without those in ``gaps`` [n, 2] of positions [start, stop).

    Columns count the keys of a part, the parts of a sequence, those before its gap, and those within it. The
    latter are left out. A part ends at a multiple of its size. Sizes depend on the sequence's own keys only, and so
    does the rounding of its numbers. A long sequence fills a card with larger parts.
    """
    start, stop = gaps.T
    cached, parts = keys - (stop - start), np.zeros((len(keys), 4), np.int64)
    parts[:, 0] = sizes = split * (1 + (cached > 8 * split) + 2 * (cached > 64 * split))
    parts[:, 1] = -(-keys // sizes)
    if stop.any():
        parts[:, 2] = before = -(-start // sizes)
        parts[:, 3] = within = np.maximum(stop // sizes - before, 0)
        parts[:, 1] -= within
    return parts


def items_of(owner: np.ndarray, parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(items int32 [n, 4], edges int32 [rows + 1]) of single tokens: rows ``owner``, each with its ``parts_of``."""
    edges = np.concatenate(([0], np.cumsum(parts[:, 1]))).astype(np.int32)
    size, _, before, within = np.repeat(parts, parts[:, 1], axis=0).T
    part = np.arange(edges[-1]) - np.repeat(edges[:-1], parts[:, 1])
    part += within * (part >= before)
    items = np.zeros((edges[-1], 4), np.int32)
    items[:, 0], items[:, 2], items[:, 3] = np.repeat(owner, parts[:, 1]), part * size, (part + 1) * size
    return items, edges


def singles_of(sequences: Sequence[PagedSequence], page_size: int, split: int) -> tuple[np.ndarray, np.ndarray]:
    """``Work.singles`` and ``Work.edges``."""
    single = [(index, s.q_stop, s.first_pages, s.evicted_pages) for index, s in enumerate(sequences) if s.queries == 1]
    owner, keys, *pages = np.array(single, np.int64).reshape(-1, 4).T
    return items_of(owner, parts_of(keys, gaps_of(np.stack(pages, axis=1), page_size), split))


def gaps_of(pages: np.ndarray, page_size: int) -> np.ndarray:
    """Positions [n, 2] at which gaps begin and end, of ``pages`` [n, 2]: those before a gap, and evicted ones."""
    first, evicted = pages.T
    return np.stack((first, first + evicted), axis=1) * page_size


def longest(sequences: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Tokens of the longest sequence of every slot, of pairs of a slot and a number of tokens."""
    most: dict[int, int] = {}
    for slot, tokens in sequences:
        if tokens > most.get(slot, 0):
            most[slot] = tokens
    return most


@dataclass(frozen=True)
class NewTokens:
    """The new tokens of ``sequences`` one after another in a packed row, whatever the pages of their caches."""

    sequences: tuple[PagedSequence, ...]
    device: torch.device

    @cached_property
    def query_edges(self) -> list[int]:
        """Token at which each sequence begins, and the end of the last."""
        edges = [0]
        for sequence in self.sequences:
            edges.append(edges[-1] + sequence.queries)
        return edges

    @cached_property
    def positions(self) -> torch.Tensor:
        """int64 [tokens]."""
        return uploaded(torch.cat([torch.arange(s.q_start, s.q_stop) for s in self.sequences]), self.device)

    @cached_property
    def longest(self) -> dict[int, int]:
        """Tokens of the longest sequence of every slot."""
        return longest((sequence.slot, sequence.q_stop) for sequence in self.sequences)

    @cached_property
    def slots(self) -> torch.Tensor:
        """int64 [tokens]."""
        return uploaded(torch.tensor([s.slot for s in self.sequences]), self.device)[self.sequence_of]

    @cached_property
    def sequence_of(self) -> torch.Tensor:
        """int64 [tokens]: the number of each token's sequence."""
        counts = torch.tensor([s.queries for s in self.sequences])
        return uploaded(torch.arange(len(counts)).repeat_interleave(counts), self.device)


@dataclass(frozen=True)
class Step:
    """Sequences over pages of ``page_size`` tokens, and their ``new`` tokens, whose properties it has."""

    sequences: tuple[PagedSequence, ...]
    page_size: int
    device: torch.device
    new: NewTokens

    def on(self, sequences: Sequence[PagedSequence]) -> Step:
        """The same step on other block tables, those of ``sequences``.

        Raises:
            ValueError: as ``step_of``.
        """
        return replace(step_of(sequences, self.page_size, self.device), new=self.new)

    @property
    def query_edges(self) -> list[int]:
        return self.new.query_edges

    @property
    def positions(self) -> torch.Tensor:
        return self.new.positions

    @property
    def longest(self) -> dict[int, int]:
        return self.new.longest

    @property
    def slots(self) -> torch.Tensor:
        return self.new.slots

    def work(self, queries: int, split: int) -> Work:
        """Items of up to ``queries`` queries, and for single ones of ``split`` keys."""
        chunks = [
            (index, first, 0, NO_LIMIT)
            for index, sequence in enumerate(self.sequences)
            if sequence.queries > 1
            for first in range(0, sequence.queries, queries)
        ]
        numbers = about(self.sequences), np.array(chunks, np.int32), *singles_of(self.sequences, self.page_size, split)
        return Work(*(uploaded(torch.from_numpy(each), self.device) for each in numbers))

    @cached_property
    def block_table(self) -> torch.Tensor:
        """int32 [sequences, pages]; -1 behind the last page of a sequence."""
        width = max(len(s.pages) for s in self.sequences)
        table = [[*s.pages, *[-1] * (width - len(s.pages))] for s in self.sequences]
        return uploaded(torch.tensor(table, dtype=torch.int32), self.device)

    @cached_property
    def gaps(self) -> torch.Tensor:
        """int64 [sequences, 2]: pages before the evicted ones, and evicted pages."""
        return uploaded(torch.tensor([(s.first_pages, s.evicted_pages) for s in self.sequences]), self.device)

    @cached_property
    def new_places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(physical page, place in it), each int64 [tokens], of the new tokens."""
        return self.places(self.new.sequence_of, self.positions)

    def places(self, sequence: torch.Tensor | int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(physical page, place in it), each int64 [n], of cached ``positions`` of sequences, by their numbers."""
        first_pages, evicted = self.gaps[sequence].unbind(-1)
        page = positions // self.page_size
        column = page - evicted * (page >= first_pages)
        return self.block_table[sequence, column].long(), positions % self.page_size


def step_of(sequences: Sequence[PagedSequence], page_size: int, device: torch.device) -> Step:
    """A step over ``sequences``.

    Raises:
        ValueError: without a sequence, for one without new tokens, or one whose pages do not end behind its last token.
    """
    if not sequences:
        raise ValueError("a step needs at least one sequence")
    for sequence in sequences:
        needed = -(-sequence.q_stop // page_size) - sequence.evicted_pages
        if sequence.queries < 1 or len(sequence.pages) < needed:
            raise ValueError(
                f"{sequence.queries} new tokens up to position {sequence.q_stop} need {needed} pages of {page_size}, "
                f"and there are {len(sequence.pages)}"
            )
    own = tuple(sequences)
    return Step(own, page_size, device, NewTokens(own, device))
