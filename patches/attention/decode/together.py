"""Sequences of a step that share calls.

The ordinary kernel takes those at equal distances with about as many keys, and sums of keys take all. The
faster of them depends on a machine's libraries, so both are timed once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch

from patches.attention.decode.ragged import Candidate, RaggedBatch, fits, ragged_attention, ragged_batch
from patches.attention.decode.single_query import ORDINARY, Reading
from patches.attention.decode.strided import StridedBatch, strided_attention, strided_batches

Cached = tuple[torch.Tensor, torch.Tensor]
"""Keys and values [places, kv_heads, dim] of all sequences."""

SEQUENCES, KEYS = 16, 96
"""A step that is timed: less than two milliseconds on one thread."""

ROUNDS = 7
"""Runs of each in turn. The fastest run counts, since other work only slows a run down."""

GAIN = 1.1
"""Sums of keys are left if they take more than so many times as long. Noise decides little where they are as fast."""


class Together(NamedTuple):
    """The shared calls of one step, the same in layers of one role and window."""

    ragged: RaggedBatch | None
    strided: list[StridedBatch]

    @property
    def members(self) -> list[int]:
        """Sequences in the order of their outputs."""
        first = [] if self.ragged is None else self.ragged.members
        return [*first, *(number for each in self.strided for number in each.members)]

    def attend(
        self, query: torch.Tensor, cached: tuple[torch.Tensor, torch.Tensor], scaling: float
    ) -> list[torch.Tensor]:
        """Outputs [1, members, heads, value dim] of each call, for ``query`` [1, heads, sequences, head_dim]."""
        first = [] if self.ragged is None else [ragged_attention(query, *cached, scaling, self.ragged)]
        return [*first, *(strided_attention(query, *cached, scaling, each) for each in self.strided)]


NONE = Together(None, [])


def together(
    readings: Sequence[Reading | None],
    places: Sequence[range | None],
    runs: Callable[[int], Sequence[range]],
    lengths: Sequence[int],
    query: torch.Tensor,
    cached: Cached,
) -> Together:
    """The shared calls of sequences with ``lengths`` keys. Those without a reading are in none.

    ``places`` are as in ``strided_batches``, and ``runs`` are the places of a sequence's keys. Tensors are as in
    ``attend``.
    """
    first = _ragged(readings, runs, lengths, query, cached)
    if first is not None:
        readings = [None if number in first.members else reading for number, reading in enumerate(readings)]
    return Together(first, strided_batches(readings, places, lengths, query, cached[0].shape[1]))


def _ragged(
    readings: Sequence[Reading | None],
    runs: Callable[[int], Sequence[range]],
    lengths: Sequence[int],
    query: torch.Tensor,
    cached: Cached,
) -> RaggedBatch | None:
    """Two sequences at least, all whose keys stay as they were written."""
    read = {number: each for number, each in enumerate(readings) if each is not None and not each.turns_keys}
    heads, (keys, values) = query.shape[1], cached
    if len(read) < 2 or not fits(query, keys, values, heads * sum(lengths[number] for number in read)):
        return None
    if not sums_are_fast(heads, keys.shape[1], query.shape[3], values.shape[2], torch.get_num_threads()):
        return None
    candidates = [Candidate(number, reading, lengths[number], runs(number)) for number, reading in read.items()]
    return ragged_batch(candidates, len(readings), heads, keys)


@cache
def sums_are_fast(heads: int, kv_heads: int, head_dim: int, value_dim: int, threads: int) -> bool:
    """True if ``ragged_attention`` is about as fast as ``strided_attention`` or faster, on so many ``threads``."""
    lengths, places = [KEYS] * SEQUENCES, [range(first, first + KEYS) for first in range(0, SEQUENCES * KEYS, KEYS)]
    one = torch.ones((), dtype=torch.float32)
    query = one.repeat(1, heads, SEQUENCES, head_dim)
    keys, values = (one.repeat(SEQUENCES * KEYS, kv_heads, dim) for dim in (head_dim, value_dim))
    (ordinary,) = strided_batches([ORDINARY] * SEQUENCES, places, lengths, query, kv_heads)
    candidates = [Candidate(number, ORDINARY, KEYS, [own]) for number, own in enumerate(places)]
    sums = ragged_batch(candidates, SEQUENCES, heads, keys)
    runs = (
        lambda: ragged_attention(query, keys, values, 1.0, sums),
        lambda: strided_attention(query, keys, values, 1.0, ordinary),
    )
    times = [[_seconds(run) for run in runs] for _ in range(ROUNDS)]
    ours, theirs = (min(each) for each in zip(*times, strict=True))
    return bool(ours < GAIN * theirs)


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
