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
        first = torch.arange(min(self.first_pages * page_size, self.q_stop))
        return torch.cat((first, torch.arange((self.first_pages + self.evicted_pages) * page_size, self.q_stop)))


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
    def new_places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(physical page, place in it), each int64 [tokens], of the new tokens."""
        new = [self.places(s, torch.arange(s.q_start, s.q_stop)) for s in self.sequences]
        pages, places = (torch.cat(part) for part in zip(*new, strict=True))
        return pages, places

    def places(self, sequence: PagedSequence, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(physical page, place in it), each int64 [n], of cached ``positions`` of a sequence."""
        page = positions // self.page_size
        column = page - sequence.evicted_pages * (page >= sequence.first_pages)
        physical = torch.tensor(sequence.pages)[column]
        return physical.to(self.device), (positions % self.page_size).to(self.device)

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
