"""Sequences of a step that share calls.

Sums of keys take all whose keys stay as they were written. The ordinary kernel takes those at equal distances with
about as many keys. The rule knows shapes only, so a server computes the same after each start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from patches.attention.decode.ragged import Member, RaggedBatch, has_sums, is_short, ragged_attention, ragged_batch
from patches.attention.decode.single_query import Reading
from patches.attention.decode.strided import StridedBatch, strided_attention, strided_batches

LEAST_SCORES, MOST_SCORES = 4096, 1 << 21
"""Scores of a step by sums. Fewer take the ordinary kernel no longer. More take over 16 MB, and 40 MB with biases."""

Cached = tuple[torch.Tensor, torch.Tensor]
"""Keys and values [places, kv_heads, dim] of all sequences."""


class SharedCalls(NamedTuple):
    """The shared calls of one step, the same in layers of one role and window."""

    ragged: RaggedBatch | None
    strided: list[StridedBatch]

    @property
    def members(self) -> list[int]:
        """Sequences in the order of their outputs."""
        first = [] if self.ragged is None else self.ragged.members
        return [*first, *(number for each in self.strided for number in each.members)]

    def attend(self, query: torch.Tensor, cached: Cached, scaling: float) -> list[torch.Tensor]:
        """Outputs [1, members, heads, value dim] of each call, for ``query`` [1, heads, sequences, head_dim]."""
        first = [] if self.ragged is None else [ragged_attention(query, *cached, scaling, self.ragged)]
        return [*first, *(strided_attention(query, *cached, scaling, each) for each in self.strided)]


NONE = SharedCalls(None, [])


def shared_calls(
    readings: Sequence[Reading | None],
    places: Sequence[range | None],
    runs: Callable[[int], Sequence[range]],
    lengths: Sequence[int],
    query: torch.Tensor,
    cached: Cached,
) -> SharedCalls:
    """The shared calls of sequences with ``lengths`` keys. Those without a reading are in none.

    ``places`` are as in ``strided_batches``, and ``runs`` are the places of a sequence's keys. Tensors are as in
    ``attend``.
    """
    first = _ragged(readings, runs, lengths, query, cached)
    if first is not None:
        readings = [None if number in first.members else reading for number, reading in enumerate(readings)]
    return SharedCalls(first, strided_batches(readings, places, lengths, query, cached[0].shape[1]))


def _ragged(
    readings: Sequence[Reading | None],
    runs: Callable[[int], Sequence[range]],
    lengths: Sequence[int],
    query: torch.Tensor,
    cached: Cached,
) -> RaggedBatch | None:
    """Two sequences at least, of those whose keys stay."""
    if not has_sums(query, *cached):
        return None
    heads, kv_heads, dim = query.shape[1], cached[0].shape[1], query.shape[3]
    read: dict[int, Reading] = {}
    scores = 0
    for number, (reading, length) in enumerate(zip(readings, lengths, strict=True)):
        if reading is not None and not reading.turns_keys and is_short(reading.keys(length), heads, kv_heads, dim):
            read[number] = reading
            scores += heads * reading.keys(length)
    if len(read) < 2 or not LEAST_SCORES <= scores <= MOST_SCORES:
        return None
    members = [Member(number, reading, lengths[number], runs(number)) for number, reading in read.items()]
    return ragged_batch(members, len(readings), heads, cached[0])
