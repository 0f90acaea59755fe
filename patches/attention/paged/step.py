"""The sequences of one step: their encodings, their new tokens, and the pages of their caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch


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
class Step:
    """Sequences one after another in a packed row of tokens, over pages of ``page_size`` tokens."""

    sequences: tuple[PagedSequence, ...]
    page_size: int
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
        return torch.cat([torch.arange(s.q_start, s.q_stop) for s in self.sequences]).to(self.device)

    @cached_property
    def block_table(self) -> torch.Tensor:
        """int32 [sequences, pages]; -1 behind the last page of a sequence."""
        width = max(len(s.pages) for s in self.sequences)
        table = [[*s.pages, *[-1] * (width - len(s.pages))] for s in self.sequences]
        return torch.tensor(table, dtype=torch.int32).to(self.device)

    @cached_property
    def gaps(self) -> torch.Tensor:
        """int64 [sequences, 2]: pages before the evicted ones, and evicted pages."""
        return torch.tensor([(s.first_pages, s.evicted_pages) for s in self.sequences]).to(self.device)

    @cached_property
    def sequence_of(self) -> torch.Tensor:
        """int64 [tokens]: the number of each token's sequence."""
        counts = torch.tensor([s.queries for s in self.sequences])
        return torch.arange(len(counts)).repeat_interleave(counts).to(self.device)

    @cached_property
    def new_places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(physical page, place in it), each int64 [tokens], of the new tokens."""
        return self.places(self.sequence_of, self.positions)

    def places(self, sequence: torch.Tensor | int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(physical page, place in it), each int64 [n], of cached ``positions`` of sequences, by their numbers."""
        first_pages, evicted = self.gaps[sequence].unbind(-1)
        page = positions // self.page_size
        column = page - evicted * (page >= first_pages)
        return self.block_table[sequence, column].long(), positions % self.page_size

    def write(self, states: torch.Tensor, pages: torch.Tensor) -> None:
        """Write ``states`` [tokens, kv_heads, dim] of the new tokens into ``pages`` [pages, size, kv_heads, dim]."""
        pages.index_put_(self.new_places, states)


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
    return Step(tuple(sequences), page_size, device)
