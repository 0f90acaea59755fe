"""The bias of the scores in each of several steps. It excludes keys before their step, and those out of reach."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from patches.attention.decode.sums.columns import Keys, Member
from patches.encoding.rotary import upcast

EXCLUDED = -np.inf


class _Part(NamedTuple):
    """Entries [heads, keys] of a part. A step reads those from its ``lows`` to its ``highs``, with a bias in
    ``biases``."""

    entries: np.ndarray
    lows: list[int]
    highs: list[int]
    biases: list[torch.Tensor]


class Biases:
    """``bias`` float32 [entries] of one step after another: 0 or the encoding's bias, or minus infinity."""

    def __init__(self, members: Sequence[Member], own: Sequence[Keys], heads: int) -> None:
        memory = np.full(heads * sum(sum(each.sizes) for each in own), EXCLUDED, np.float32)
        self.bias, self._memory, self._biased = torch.from_numpy(memory), memory, list[_Part]()
        firsts, lows, highs = list[np.ndarray](), list[list[int]](), list[list[int]]()
        every, stop = np.arange(heads), 0
        for member, keys in zip(members, own, strict=True):
            start, width = stop, sum(keys.sizes)
            stop += heads * width
            for number, column in keys.parts:
                part = _part(member, number, memory[start:stop].reshape(heads, width)[:, column:])
                if part.biases:
                    self._biased.append(part)
                    continue
                part.entries[:, part.lows[0] : part.highs[0]] = 0.0
                firsts.append(start + column + width * every)
                lows.append(part.lows)
                highs.append(part.highs)
        self._added, self._removed = _moves(firsts, highs), _moves(firsts, lows)
        self._add_biases(0)

    def move(self, step: int) -> None:
        """Have the biases of a ``step`` in place of those of the one before."""
        if self._added is not None:
            self._memory[self._added[step - 1]] = 0.0
        if self._removed is not None:
            self._memory[self._removed[step - 1]] = EXCLUDED
        self._add_biases(step)

    def _add_biases(self, step: int) -> None:
        for entries, lows, highs, biases in self._biased:
            entries[:, : lows[step]] = EXCLUDED
            entries[:, lows[step] : highs[step]] = upcast(biases[step][0, :, 0]).numpy()


def _part(member: Member, number: int, entries: np.ndarray) -> _Part:
    if member.is_ordinary:
        steps = 1 + len(member.ahead)
        return _Part(entries, [0] * steps, list(range(member.length, member.length + steps)), [])
    parts = [reading.parts[number] for reading in (member.reading, *member.ahead)]
    lows, highs, _ = zip(*(part.columns.indices(member.length + n) for n, part in enumerate(parts)), strict=True)
    biases = [part.bias for part in parts if part.bias is not None]
    assert len(biases) in (0, len(parts)), "parts have biases in all steps or in none"
    return _Part(entries, [low - lows[0] for low in lows], [high - lows[0] for high in highs], biases)


def _moves(firsts: Sequence[np.ndarray], edges: Sequence[list[int]]) -> list[np.ndarray] | None:
    """For each step behind the first one, the entries that an edge of their part moves over; None if none does.

    Parts have rows that begin at ``firsts`` [heads], and ``edges`` by step.
    """
    moves = [number for number, each in enumerate(edges) if each[-1] > each[0]]
    if not moves:
        return None
    rows, by_step = np.stack([firsts[number] for number in moves]), np.array([edges[number] for number in moves]).T
    if (np.diff(by_step, axis=0) == 1).all():
        return list((rows + by_step[:-1, :, None]).reshape(len(by_step) - 1, -1))
    moved = [(after > before, before[:, None]) for before, after in pairwise(by_step)]
    return [(rows[has_moved] + before[has_moved]).ravel() for has_moved, before in moved]
