"""Bands that take all queries of a long segment in a few calls of the kernel. The calls nearly always have no mask."""

from __future__ import annotations

import torch

from patches.attention.blocks import add_band, blocks
from patches.attention.log_sum_exp import Attended, add, part, sdpa_with_lse
from patches.attention.states import SegmentStates
from patches.encoding.bands import Band
from patches.encoding.masks import ChunkRange, DistanceRange


def at_once(states: SegmentStates, band: Band, attended: Attended) -> bool:
    """Add the attention of all queries to all keys of ``band`` to ``attended``.

    Returns False and adds nothing if the band has to go by blocks.
    """
    predicate = band.predicate
    if not (states.is_bare and states.is_as_written(band.key_map)):
        return False
    if isinstance(predicate, DistanceRange) and predicate.high is None and states.q_stop > predicate.low:
        _triangle(states, band, predicate.low, (states.key, states.value), attended)
        return True
    if isinstance(predicate, ChunkRange) and predicate.high in (None, predicate.low + 1):
        first = -(-max(states.q_start, predicate.low * predicate.size) // predicate.size) * predicate.size
        if states.q_stop - first > predicate.size:
            _chunks(states, band, predicate, (states.key, states.value), attended, first)
            return True
    return False


def _triangle(states: SegmentStates, band: Band, low: int, keys: Attended, attended: Attended) -> None:
    """To all keys at a distance of ``low`` or more: query p to keys 0 .. p - low."""
    first = max(states.q_start, low)  # queries before it reach no key
    late = part(attended, slice(first - states.q_start, None))
    query = states.queries(states.query[:, :, first - states.q_start :], first, band)
    square, before = part(keys, slice(first - low, states.q_stop - low)), part(keys, slice(first - low))
    add(late, *sdpa_with_lse(query, *square, None, states.scaling, causal=True))
    if first > low:
        add(late, *sdpa_with_lse(query, *before, None, states.scaling))


def _chunks(
    states: SegmentStates, band: Band, chunks: ChunkRange, keys: Attended, attended: Attended, first: int
) -> None:
    """To the chunk ``low`` before that of the query. If the range has no end, also to all chunks before that one.

    From ``first`` on, where a chunk begins, chunk i of queries attends to chunk i of the keys from ``base`` on. The
    chunks between are a staircase. Every second chunk of queries attends to the one chunk of keys before it. Every
    second pair of chunks attends to the pair before it, then fours, eights. Each width is one call: n chunks take
    log2(n).
    """
    early, base = first - states.q_start, first - chunks.low * chunks.size
    for columns in blocks(states):  # an earlier segment began this chunk, or the chunk reaches no key
        if columns.stop <= early:
            add_band(states, columns, band, keys[0], 0, attended)
    query = states.queries(states.query[:, :, early:], first, band)
    late, late_keys = part(attended, slice(early, None)), part(keys, slice(base, None))
    _by_period(query, late_keys, late, chunks.size, 0, states.scaling, causal=chunks.low == 0)
    if chunks.high is None:
        width = chunks.size
        while width < query.shape[2]:
            _by_period(query, late_keys, late, 2 * width, width, states.scaling)
            width *= 2
        if base:
            add(late, *sdpa_with_lse(query, *part(keys, slice(base)), None, states.scaling))


def _by_period(
    query: torch.Tensor,
    keys: Attended,
    attended: Attended,
    period: int,
    skip: int,
    scaling: float,
    *,
    causal: bool = False,
) -> None:
    """In every ``period`` of columns, the queries behind the first ``skip`` to as many of the first keys.

    Whole periods are rows of one batch; an incomplete last one is a call by itself.
    """
    length, width = query.shape[2], period - skip
    whole = length // period
    stop, early, late = whole * period, slice(width), slice(skip, None)

    def rows(states: torch.Tensor, chosen: slice) -> torch.Tensor:
        """View [rows, whole periods, heads, chosen columns of each, ...]."""
        return states[:, :, :stop].unflatten(2, (whole, period))[:, :, :, chosen].transpose(1, 2)  # type: ignore[no-any-return]

    if whole:
        q, k, v = rows(query, late), rows(keys[0], early), rows(keys[1], early)
        new = sdpa_with_lse(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), None, scaling, causal=causal)
        so_far = rows(attended[0], late), rows(attended[1], late)
        add(so_far, *(states.unflatten(0, (-1, whole)) for states in new))
    if stop + skip < length:
        first = part(keys, slice(stop, min(stop + width, length) if causal else stop + width))
        rest = slice(stop + skip, None)
        add(part(attended, rest), *sdpa_with_lse(query[:, :, rest], *first, None, scaling, causal=causal))
