"""New queries of several sequences in one call, where their keys lie at equal distances in the cache.

Over a few hundred keys, a call takes longer than its mathematics, most of all on several threads. At equal distances,
the keys of many sequences are one tensor with a stride. So no key is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

ALIKE = 64
"""Sequences of one call have fewer keys than the longest by less than this. Another call takes as long as reading so
many."""


class StridedBatch(NamedTuple):
    """Sequences, by their number in the step. From one to the next, first keys are ``stride`` places apart.

    Of the ``length`` keys from there on, ``bias`` [sequences, 1, 1, length] excludes those behind a sequence's last.
    It is None if all have as many.
    """

    members: list[int]
    first: int
    stride: int
    length: int
    bias: torch.Tensor | None


def strided_batches(
    members: Iterable[int], places: Sequence[range | None], lengths: Sequence[int], states: torch.Tensor
) -> list[StridedBatch]:
    """Batches of two ``members`` at least, whose encoding is ordinary attention. The other members are in none.

    ``places`` are the places in the cache that each sequence may read, from its first key on. ``lengths`` are its
    numbers of keys. Biases are like ``states``.
    """
    found = []
    for batch in _equally_spaced(members, places, lengths):
        starts = [places[member].start for member in batch]  # type: ignore[union-attr]
        own = [lengths[member] for member in batch]
        bias = None
        if min(own) < max(own):
            behind = torch.arange(max(own)) >= torch.tensor(own)[:, None]
            lowest = torch.finfo(states.dtype).min
            bias = torch.zeros(behind.shape, dtype=states.dtype).masked_fill_(behind, lowest)[:, None, None]
        found.append(StridedBatch(batch, starts[0], starts[1] - starts[0], max(own), bias))
    return found


def strided_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, batch: StridedBatch
) -> torch.Tensor:
    """Output [1, sequences, heads, value dim] of the members' queries in ``query`` [1, heads, all sequences, head_dim].

    ``keys`` and ``values`` [places, kv_heads, dim] are a layer's whole cache. Heads that share a key head are its
    queries, since nothing but ends is masked.
    """
    members, heads = len(batch.members), query.shape[1]
    query = query.transpose(1, 2)
    if batch.members != list(range(query.shape[1])):
        query = query[:, batch.members]
    query = query.reshape(members, keys.shape[1], -1, query.shape[-1])
    key, value = _strided(keys, batch), _strided(values, batch)
    out = F.scaled_dot_product_attention(query, key, value, batch.bias, scale=scaling)
    return out.reshape(1, members, heads, -1)


def _strided(states: torch.Tensor, batch: StridedBatch) -> torch.Tensor:
    """[sequences, kv_heads, length, dim] in the cache ``states`` [places, kv_heads, dim]."""
    place, head, one = states.stride()
    size = len(batch.members), states.shape[1], batch.length, states.shape[2]
    first = states.storage_offset() + batch.first * place
    return states.as_strided(size, (batch.stride * place, head, place, one), first)


def _equally_spaced(members: Iterable[int], places: Sequence[range | None], lengths: Sequence[int]) -> list[list[int]]:
    """Parts of two ``members`` at least, in the order of their places, with equal distances between these."""
    alike: list[list[tuple[int, int]]] = []
    longest = 0
    for length, member in sorted(((lengths[member], member) for member in members), reverse=True):
        place = places[member]
        if place is None:
            continue
        if not alike or longest - length >= ALIKE:
            alike.append([])
            longest = length
        alike[-1].append((place.start, member))
    parts: list[list[int]] = []
    for group in alike:
        part: list[int] = []
        for start, member in sorted(group):
            if not _continues(part, start, member, places, lengths):
                parts.append(part)
                part = []
            part.append(member)
        parts.append(part)
    return [part for part in parts if len(part) > 1]


def _continues(
    part: list[int], start: int, member: int, places: Sequence[range | None], lengths: Sequence[int]
) -> bool:
    """True if ``member`` has the distance of ``part``, and each of both may read as many keys as the longest has."""
    firsts = [*(places[m].start for m in part[-2:]), start]  # type: ignore[union-attr]
    if len(firsts) == 3 and firsts[2] - firsts[1] != firsts[1] - firsts[0]:
        return False
    both = [*part, member]
    return max(lengths[m] for m in both) <= min(len(places[m]) for m in both)  # type: ignore[arg-type]
