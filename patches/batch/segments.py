"""Division of one forward into sequences: their rows, columns and slots.

A padded static batch and a packed paged batch both reduce to a list of segments. So attention is
written once, for a segment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import TypeVar

import torch

from patches.batch.slots import POSITION_BITS, decode

T = TypeVar("T")

SLOTS_DIFFER = "every token of a row must carry the same slot"


@dataclass(frozen=True)
class Segment:
    """Rows of one batch that run the same encoding over the same positions.

    Queries are the columns ``query`` of ``rows``, at positions q_start, q_start + 1, ... Their keys have the positions
    0 .. q_start + len(query) - 1, the first of them in key column ``key_column``.
    """

    rows: slice
    query: slice
    slot: int
    q_start: int
    key_column: int

    @property
    def q_stop(self) -> int:
        return self.q_start + int(self.query.stop) - int(self.query.start)


@dataclass
class Batch:
    """The segments of one forward, and the tables its layers share.

    ``packed`` batches have their sequences one after another in a single row, keys likewise. ``columns`` is the number
    of key columns that a full cache has seen, for layers that cache only the last ones. ``places`` are the runs of each
    sequence's keys in a cache that attention reads in place. The last run has those behind too, which only it will
    write, and which have finite numbers. A sequence has the same one of ``names`` from step to step.
    """

    segments: list[Segment]
    columns: int = 0
    packed: bool = False
    places: list[list[range]] | None = None
    names: list[str] = field(default_factory=list)
    _shared: dict[Hashable, object] = field(default_factory=dict)
    _calls: Counter[int] = field(default_factory=Counter)

    @property
    def slots(self) -> Collection[int]:
        """The slots of all sequences."""
        return {segment.slot for segment in self.segments}

    @property
    def is_static(self) -> bool:
        """True if a graph of the forward may be captured: the forward reads nothing from the host."""
        return False

    def follows(self, before: Batch) -> bool:
        """True if it has the next token of each sequence of ``before``, in the same places."""
        if self.names != before.names or self.places is None or before.places is None:
            return False
        each = zip(self.segments, before.segments, self.places, before.places, strict=True)
        return all(
            own.slot == other.slot
            and own.q_start == other.q_stop
            and (runs[:-1], runs[-1].start) == (other_runs[:-1], other_runs[-1].start)
            for own, other, runs, other_runs in each
        )

    def shared(self, key: Hashable, make: Callable[[], T]) -> T:
        """``make()`` once per forward and ``key``: layers differ in weights, not in positions."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]  # type: ignore[return-value]

    def calls_before(self, layer: int) -> int:
        """Number of earlier calls for ``layer`` in this forward: a layer may attend twice."""
        self._calls[layer] += 1
        return self._calls[layer] - 1


def packed_batch(
    sequences: list[tuple[int, int, int]], places: list[list[range]] | None = None, names: Iterable[str] = ()
) -> Batch:
    """Batch of a packed row from (slot, first position, number of new tokens) per sequence.

    Raises:
        ValueError: for sequences in places without names: layers keep what they know of each.
    """
    own = list(names)
    if places is not None and len(own) != len(sequences):
        raise ValueError("names: each sequence in places needs one")
    segments, column = [], 0
    for slot, q_start, length in sequences:
        segments.append(Segment(slice(0, 1), slice(column, column + length), slot, q_start, 0))
        column += length
    return Batch(segments, packed=True, places=places, names=own)


def part_of(runs: Sequence[range], span: range) -> Iterator[range]:
    """The places of keys ``span`` of a sequence with its keys in ``runs``."""
    first = 0
    for run in runs:
        part = run[max(0, span.start - first) : max(0, span.stop - first)]
        if part:
            yield part
        first += len(run)


def padded_batch(rows: int, position_ids: torch.Tensor, padding_mask: torch.Tensor | None) -> Batch:
    """Batch of ``rows`` from encoded ``position_ids`` [rows or 1, new tokens] and a padding mask [rows, seen].

    Padding is on the left, on the right, or both. Its positions may be any: nothing attends to it. Without padding, a
    row may have several texts, each from position 0 on. The host reads a few numbers per row back, once per forward.

    Raises:
        ValueError: for a gap in a row's mask, and for positions of a text that skip or repeat.
    """
    new, alike = position_ids.shape[1], padding_mask is None and position_ids.shape[0] == 1
    if alike and new == 1:  # a step of decoding computes nothing
        slot, q_start = divmod(int(position_ids), 1 << POSITION_BITS)
        return Batch([Segment(slice(0, rows), slice(0, 1), slot, q_start, 0)], columns=q_start + 1)
    position_ids = position_ids if alike else position_ids.expand(rows, -1)
    layout = _unpadded(position_ids) if padding_mask is None else _padded(position_ids, padding_mask)
    if layout is None:
        return Batch(list(_texts(position_ids.expand(rows, -1))), columns=new)
    segments, row = [], 0
    for (slot, q_start, query, pad), group in groupby(layout):
        count = rows if alike else len(list(group))
        segments.append(Segment(slice(row, row + count), slice(query, new), slot, q_start, pad))
        row += count
    return Batch(segments, columns=max(s.key_column + s.q_stop for s in segments))


def _unpadded(position_ids: torch.Tensor) -> list[tuple[int, int, int, int]] | None:
    """(slot, first position, 0, 0) of every row of encoded positions [rows, new tokens]; None if some do not count up
    by one."""
    new = position_ids.shape[1]
    edges = [position_ids[:, 0], position_ids[:, -1]]
    if new > 2:  # a step of decoding computes nothing more
        edges.append((position_ids.diff() == 1).all(1))
    layout = []
    for first, last, *counts_up in torch.stack(edges, 1).tolist():
        (slot, q_start), (last_slot, q_last) = divmod(first, 1 << POSITION_BITS), divmod(last, 1 << POSITION_BITS)
        if slot != last_slot:
            raise ValueError(SLOTS_DIFFER)
        if q_start + new - 1 != q_last or not all(counts_up):
            return None
        layout.append((slot, q_start, 0, 0))
    if len({q_start for _, q_start, *_ in layout}) > 1:
        raise ValueError("position_ids must start alike in every row unless a padding mask sets them apart")
    return layout


def _texts(position_ids: torch.Tensor) -> Iterator[Segment]:
    """The texts of each row of encoded positions [rows, new tokens]: each begins at 0, as transformers packs them."""
    positions, slots = (numbers.tolist() for numbers in decode(position_ids))
    new = position_ids.shape[1]
    for row, (position, slot) in enumerate(zip(positions, slots, strict=True)):
        begins = [0, *(column for column in range(1, new) if position[column] != position[column - 1] + 1)]
        if any(position[begin] for begin in begins):
            raise ValueError("position_ids must count up by one in every row; another text in a row begins at 0")
        if len(set(slot)) > 1:
            raise ValueError(SLOTS_DIFFER)
        for begin, end in pairwise([*begins, new]):
            yield Segment(slice(row, row + 1), slice(begin, end), slot[0], 0, begin)


def _padded(position_ids: torch.Tensor, mask: torch.Tensor) -> list[tuple[int, int, int, int]]:
    """(slot, first position, its query column, its key column) of every row under a padding mask [rows, seen].

    A row that is nothing but padding so far (chunked prefill) attends to its last column, without effect.
    """
    new, seen = position_ids.shape[1], mask.shape[1]
    ones = mask.to(position_ids.device).bool().to(torch.uint8)
    first, behind = ones.argmax(1), ones.flip(1).argmax(1)  # of the first one, and columns behind the last one
    found = [position_ids[:, -1], first, behind, ones.sum(1)]
    if new > 1:
        found += [part.to(first.dtype) for part in _counted(position_ids, first, ones)]
    layout = []
    for encoded, begin, end, count, *checked in torch.stack(found, 1).tolist():
        slot, last = divmod(encoded, 1 << POSITION_BITS)
        counts, alike = checked or (end > 0 or count == 0 or last == seen - 1 - begin, True)
        pad = begin if count else seen - 1
        if count and begin + count + end != seen:
            raise ValueError(
                "attention_mask: a row has zeros between its ones; padding is before a text or behind it. Pad on the "
                "left for generate: padding_side='left'"
            )
        if not counts:
            raise ValueError("position_ids must count from 0, one by one, at each row's first unpadded token")
        if not alike:
            raise ValueError(SLOTS_DIFFER)
        query = min(max(0, pad - (seen - new)), new - 1)
        layout.append((slot, seen - new + query - pad, query, pad))
    return layout


def _counted(position_ids: torch.Tensor, first: torch.Tensor, ones: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(positions count from 0 at column ``first``, all tokens have one slot) by row [rows]."""
    new, seen = position_ids.shape[1], ones.shape[1]
    position, slot = decode(position_ids)
    column = torch.arange(seen - new, seen, device=ones.device)
    counts = (position == column - first[:, None]) | (ones[:, -new:] == 0)
    return counts.all(1), (slot == slot[:, :1]).all(1)


def padded_keys(batch: Batch, num_kv: int) -> list[slice]:
    """Key columns per segment. A layer's cache may have fewer columns than were seen (sliding) or more (static)."""
    evicted = max(0, batch.columns - num_kv)
    return [slice(max(0, s.key_column - evicted), s.key_column + s.q_stop - evicted) for s in batch.segments]


def packed_lengths(batch: Batch, key_edges: torch.Tensor) -> tuple[list[int], list[int]]:
    """(number of new tokens, number of keys) of every sequence of a packed row."""
    edges = key_edges[: len(batch.segments) + 1].tolist()
    return (
        [segment.query.stop - segment.query.start for segment in batch.segments],
        [last - first for first, last in pairwise(edges)],
    )
