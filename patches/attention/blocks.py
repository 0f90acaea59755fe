"""Attention of one band in blocks of queries. Only keys that some of a block's queries cover need a mask."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from patches.attention.log_sum_exp import Attended, add, part, sdpa_with_lse
from patches.attention.states import SegmentStates
from patches.encoding.bands import Band
from patches.encoding.masks import ChunkRange

QUERY_BLOCK = 256
"""Most queries per block: bounds a mask or a bias to [heads, 256, k] floats."""

MANY_KEYS = 1024
"""Keys from which a bias by distance is best read in large blocks. A CPU takes all else in blocks of half the queries:
it computes fewer pairs that a mask excludes."""

WORTH_A_CALL, WORTH_A_CALL_BESIDE_A_VIEW = 64, 512
"""Least number of keys, all covered by every query of a block, that is worth a call without a mask. The second is that
of a CPU whose mask is a view. Then the calls on both sides cost more than masking."""


def blocks(states: SegmentStates) -> Iterator[slice]:
    """Blocks of query columns. None lies across two chunks of a band."""
    sizes = {band.predicate.size for band in states.resolved.recipe.bands if isinstance(band.predicate, ChunkRange)}
    first, most = states.q_start, _most(states)
    while first < states.q_stop:
        stop = min([first + most, states.q_stop, *((first // size + 1) * size for size in sizes)])
        yield slice(first - states.q_start, stop - states.q_start)
        first = stop


def _most(states: SegmentStates) -> int:
    """Most queries per block."""
    bias, queries = states.resolved.recipe.score_bias, states.query.shape[2]
    is_large = bias is not None and bias.by_distance and states.length >= MANY_KEYS
    is_one_call = states.resolved.is_plain and queries <= QUERY_BLOCK  # transformers' own, to the bit
    return QUERY_BLOCK if is_large or is_one_call or states.key.device.type != "cpu" else QUERY_BLOCK // 2


def add_band(
    states: SegmentStates, columns: slice, band: Band, key: torch.Tensor, first: int, attended: Attended
) -> None:
    """Add the attention of the queries of ``columns`` in one band, in up to three parts.

    ``key`` has the keys that the band reaches, as it sees them, from key column ``first`` on. Keys that all these
    queries cover need no mask, and masks are slow.
    """
    query, q_low = states.query[:, :, columns], states.q_start + columns.start
    queries = query.shape[2]
    predicate = states.predicate(band)
    reached = states.columns(*predicate.key_range(q_low, q_low + queries - 1))
    full = states.columns(*predicate.key_range(q_low + queries - 1, q_low))
    by_distance = _goes_by_distance(states, band)
    is_view = by_distance and states.key.device.type == "cpu"
    least = WORTH_A_CALL_BESIDE_A_VIEW if is_view else WORTH_A_CALL
    if states.resolved.recipe.score_bias is not None or full.stop - full.start < least:
        cuts = [reached]
    else:
        cuts = [slice(reached.start, full.start), full, slice(full.stop, reached.stop)]
    query = states.queries(query, q_low, band)
    for cut in cuts:
        if cut.start < cut.stop:
            keys = key[:, :, cut.start - first : cut.stop - first], states.value[:, :, cut]
            if cut is full:
                new = sdpa_with_lse(query, *keys, None, states.scaling)
            elif by_distance:
                bias = _diagonals(states, band, q_low + queries - 1, queries, cut)
                backward = sdpa_with_lse(query.flip(2), *keys, bias, states.scaling)
                new = backward[0].flip(2), backward[1].flip(2)
            else:
                bias = states.bias([band], *states.indices(q_low, queries, cut))
                new = sdpa_with_lse(query, *keys, bias, states.scaling)
            add(part(attended, columns), *new)


def _goes_by_distance(states: SegmentStates, band: Band) -> bool:
    """True if distance alone decides over the pairs of ``band`` and their bias, and the keys have no gap."""
    score_bias = states.resolved.recipe.score_bias
    by_distance = states.predicate(band).by_distance and (score_bias is None or score_bias.by_distance)
    return states.num_sinks == 0 and by_distance


def _bias_by_distance(states: SegmentStates, band: Band, queries: int) -> torch.Tensor:
    """Additive bias of ``band`` by distance [heads or 1, distances].

    Distances fall from the segment's largest to 1 - ``queries``: later keys beside the first of so many queries.
    """
    last = torch.tensor([states.q_stop - 1], device=states.query.device)
    kv_idx = torch.arange(states.k_start, states.q_stop + queries - 1, device=states.query.device)
    return states.bias([band], last[:, None], kv_idx[None]).flatten(0, -2)


def _diagonals(states: SegmentStates, band: Band, q_high: int, queries: int, columns: slice) -> torch.Tensor:
    """Additive bias [1, heads or 1, q, k] of the queries q_high, q_high - 1, ..., in that order.

    Its rows are a table of distances, each row one entry further along. The bias is a view; otherwise [q, k] numbers
    per head would be made and read. Both strides are positive, as torch wants, only for the reverse order of queries.
    """
    kind = ("bias by distance", band.predicate, states.query.dtype)
    table = states.shared(kind, lambda: _bias_by_distance(states, band, QUERY_BLOCK))
    first = states.q_stop - 1 - q_high + columns.start  # the table begins with the segment's largest distance
    size = (1, table.shape[0], queries, columns.stop - columns.start)
    return table.as_strided(size, (0, table.shape[1], 1, 1), first)
