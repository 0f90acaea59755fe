"""Division of one forward into sequences: their rows, columns and slots.

A padded static batch and a packed paged batch both reduce to a list of segments. So attention is
written once, for a segment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import TypeVar

import torch

from patches.batch.slots import POSITION_BITS, decode

T = TypeVar("T")


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
    of key columns that a full cache has seen, for layers that cache only the last ones. ``places`` are those of a
    sequence's keys in a cache that attention reads in place. With them are those behind, which only it will write, and
    which have finite numbers. Sequences whose keys are copied have None.
    """

    segments: list[Segment]
    columns: int = 0
    packed: bool = False
    places: list[range | None] | None = None
    _shared: dict[Hashable, object] = field(default_factory=dict)
    _calls: Counter[int] = field(default_factory=Counter)

    @property
    def is_static(self) -> bool:
        """True if a graph of the forward may be captured: the forward reads nothing from the host."""
        return False

    def shared(self, key: Hashable, make: Callable[[], T]) -> T:
        """``make()`` once per forward and ``key``: layers differ in weights, not in positions."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]  # type: ignore[return-value]

    def calls_before(self, layer: int) -> int:
        """Number of earlier calls for ``layer`` in this forward: a layer may attend twice."""
        self._calls[layer] += 1
        return self._calls[layer] - 1


def packed_batch(sequences: list[tuple[int, int, int]], places: list[range | None] | None = None) -> Batch:
    """Batch of a packed row from (slot, first position, number of new tokens) per sequence."""
    segments, column = [], 0
    for slot, q_start, length in sequences:
        segments.append(Segment(slice(0, 1), slice(column, column + length), slot, q_start, 0))
        column += length
    return Batch(segments, packed=True, places=places)


def padded_batch(rows: int, position_ids: torch.Tensor, padding_mask: torch.Tensor | None) -> Batch:
    """Batch of ``rows`` from encoded ``position_ids`` [rows or 1, new tokens] and a padding mask [rows, seen].

    Reads two columns of ``position_ids`` back to the host, once per forward.

    Raises:
        ValueError: when a row's positions do not count up by one from its first unpadded token.
    """
    new = position_ids.shape[1]
    if padding_mask is None and position_ids.shape[0] == 1:
        return _uniform_batch(rows, position_ids[0, :: max(new - 1, 1)].tolist(), new)
    position_ids = position_ids.expand(rows, -1)
    seen = new if padding_mask is None else padding_mask.shape[1]
    padding = [0] * rows if padding_mask is None else _leading_zeros(padding_mask)
    first_query = [min(max(0, pad - (seen - new)), new - 1) for pad in padding]
    index = torch.tensor(first_query, device=position_ids.device)[:, None]
    first, first_slot = (part.flatten().tolist() for part in decode(position_ids.gather(1, index)))
    last, last_slot = (part.tolist() for part in decode(position_ids[:, -1]))
    if padding_mask is None and [a + new - 1 for a in first] != last:
        raise ValueError("position_ids must count up by one along every row (packed rows need segments)")
    if padding_mask is None and len(set(first)) > 1:
        raise ValueError("position_ids must start alike in every row unless a padding mask sets them apart")
    if (
        padding_mask is not None
        and [seen - new + q - pad for q, pad in zip(first_query, padding, strict=True)] != first
    ):
        raise ValueError("position_ids must count from 0 at each row's first unpadded token")
    if first_slot != last_slot:
        raise ValueError("every token of a row must carry the same slot")
    layout = list(zip(first_slot, first, first_query, padding, strict=True))
    segments, row = [], 0
    for (slot, q_start, query, pad), group in groupby(layout):
        count = len(list(group))
        segments.append(Segment(slice(row, row + count), slice(query, new), slot, q_start, pad))
        row += count
    return Batch(segments, columns=max(s.key_column + s.q_stop for s in segments))


def _uniform_batch(rows: int, edges: list[int], new: int) -> Batch:
    """Batch of rows that share one row of positions, from its first and last encoded position."""
    (slot, first), (last_slot, last) = divmod(edges[0], 1 << POSITION_BITS), divmod(edges[-1], 1 << POSITION_BITS)
    if first + new - 1 != last:
        raise ValueError("position_ids must count up by one along every row (packed rows need segments)")
    if slot != last_slot:
        raise ValueError("every token of a row must carry the same slot")
    return Batch([Segment(slice(0, rows), slice(0, new), slot, first, 0)], columns=first + new)


def _leading_zeros(mask: torch.Tensor) -> list[int]:
    zeros = (mask.to(torch.int32).cumsum(1) == 0).sum(1)
    # A row that is nothing but padding so far (chunked prefill) attends to its last column, without effect.
    counts: list[int] = zeros.clamp_max(mask.shape[1] - 1).tolist()
    return counts


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
