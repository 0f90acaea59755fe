"""Sequences of a step that share calls.

Sums of keys take all for which they are faster. Of the others, the ordinary kernel takes those at equal distances with
about as many keys. The rule knows shapes only, so a server computes the same after each start.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch

from patches.attention.decode.reading import Reading
from patches.attention.decode.strided import StridedBatch, strided_attention, strided_batches
from patches.attention.decode.sums.columns import Member
from patches.attention.decode.sums.ragged import (
    FEW_HEADS,
    RaggedBatch,
    has_sums,
    is_short,
    ragged_attention,
    ragged_batch,
)
from patches.attention.decode.sums.rings import Ring, Rings

LEAST_SCORES, LEAST_ALONE, MOST_SCORES = 4096, 1 << 14, 1 << 21
"""Scores of a step by sums, of several sequences and of one. Fewer take the ordinary kernel no longer. More take over
16 MB, and up to 48 MB with biases and keys that turn."""

Cached = tuple[torch.Tensor, torch.Tensor]
"""Keys and values [kv_heads, places, dim] of all sequences."""


class SharedCalls(NamedTuple):
    """The shared calls of one step, the same in layers of one role and window."""

    ragged: RaggedBatch | None
    strided: list[StridedBatch]

    @property
    def members(self) -> list[int]:
        """Sequences in the order of their outputs."""
        first = [] if self.ragged is None else self.ragged.members
        return [*first, *(number for each in self.strided for number in each.members)]

    @property
    def ahead(self) -> int:
        """Steps behind this one that the calls serve."""
        return 0 if self.strided or self.ragged is None else self.ragged.ahead

    def begin_next(self) -> None:
        """Have the next step of the same sequences, one of those ahead."""
        if self.ragged is not None:
            self.ragged.begin(self.ragged.step + 1)

    def attend(self, query: torch.Tensor, cached: Cached, scaling: float) -> list[torch.Tensor]:
        """Outputs [1, members, heads, value dim] of each call, for ``query`` [1, heads, sequences, head_dim]."""
        first = [] if self.ragged is None else [ragged_attention(query, *cached, scaling, self.ragged)]
        return [*first, *(strided_attention(query, *cached, scaling, each) for each in self.strided)]


NONE = SharedCalls(None, [])


class Course(NamedTuple):
    """A step among those behind it: the ``names`` of its sequences, their ``rings``, and their readings ``ahead``.

    There are as many of each sequence.
    """

    names: Sequence[Hashable]
    rings: Rings
    ahead: Sequence[Sequence[Reading]]


def turns_once(query: torch.Tensor, cached: Cached, lengths: Sequence[int]) -> bool:
    """True if a step is by sums that read all keys of sequences with ``lengths``: for those, keys turn once.

    Other calls take longer where the query turns for each part, and serve one step.
    """
    if not torch.is_inference_mode_enabled() or not has_sums(query, *cached):
        return False
    heads, kv_heads, dim = query.shape[1], cached[0].shape[0], query.shape[3]
    is_each = all(is_short(length, heads, kv_heads, dim) for length in lengths)
    return is_each and _are_summed(heads * sum(lengths), len(lengths), heads, kv_heads)


def _are_summed(scores: int, sequences: int, heads: int, kv_heads: int) -> bool:
    """True for a step of so many ``scores`` in total."""
    if not sequences or (sequences == 1 and heads > FEW_HEADS * kv_heads):
        return False
    return (LEAST_SCORES if sequences > 1 else LEAST_ALONE) <= scores <= MOST_SCORES


def shared_calls(
    readings: Sequence[Reading | None],
    runs: Sequence[Sequence[range]],
    lengths: Sequence[int],
    query: torch.Tensor,
    cached: Cached,
    spare: range = range(0),
    course: Course | None = None,
) -> SharedCalls:
    """The shared calls of sequences with ``lengths`` keys. Those without a reading are in none.

    ``runs`` are the places of each sequence's keys, and of those ahead. Those in ``spare`` are of none. Tensors are as
    in ``attend``.
    """
    first = _ragged(readings, runs, lengths, query, cached, spare, course)
    if first is not None:
        readings = [None if number in first.members else reading for number, reading in enumerate(readings)]
    places = [own[0] if len(own) == 1 else None for own in runs]
    return SharedCalls(first, strided_batches(readings, places, lengths, query, cached[0].shape[0]))


def _ragged(
    readings: Sequence[Reading | None],
    runs: Sequence[Sequence[range]],
    lengths: Sequence[int],
    query: torch.Tensor,
    cached: Cached,
    spare: range,
    course: Course | None,
) -> RaggedBatch | None:
    """All sequences, as long as there is room for the keys that turn.

    Only a batch of all sequences, whose keys turn in rings, serves the steps ahead.
    """
    if not has_sums(query, *cached):
        return None
    heads, kv_heads, dim = query.shape[1], cached[0].shape[0], query.shape[3]
    each = enumerate(zip(readings, lengths, strict=True))
    read = {
        number: reading
        for number, (reading, length) in each
        if reading is not None and is_short(reading.keys(length), heads, kv_heads, dim)
    }
    in_rings = {number: _rings_of(reading, number, course) for number, reading in read.items()}
    spare = spare if course is None else course.rings.free
    members, scores, room = list[Member](), 0, len(spare)
    for number, reading in read.items():
        member = Member(number, reading, lengths[number], runs[number], in_rings[number])
        if member.turned_keys <= room:
            members.append(member)
            scores += heads * reading.keys(member.length)
            room -= member.turned_keys
    if not _are_summed(scores, len(members), heads, kv_heads):
        return None
    if course is not None and len(members) == len(readings) and room == len(spare):
        members = [member._replace(ahead=course.ahead[member.number]) for member in members]
    return ragged_batch(members, len(readings), heads, cached[0], spare.start)


def _rings_of(reading: Reading, number: int, course: Course | None) -> dict[int, Ring]:
    """The rings of a sequence by part of its reading, as far as there are places for them."""
    if course is None:
        return {}
    name, room = course.names[number], len(course.ahead[number])
    once = ((part, each.once) for part, each in enumerate(reading.parts) if each.once is not None)
    found = ((part, course.rings.ring(name, turning, room)) for part, turning in once)
    return {part: ring for part, ring in found if ring is not None}
