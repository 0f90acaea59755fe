"""The calls of a step, and those that layers keep for the steps behind it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from patches.attention.decode.reading import Reading
from patches.attention.decode.shared import Cached, SharedCalls
from patches.attention.decode.single_query import read
from patches.attention.decode.sums.rings import Rings
from patches.batch.segments import Batch, part_of

STEPS = 8
"""Steps that a plan serves. With more, each reads more keys in vain."""

States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, keys and values of one sequence, each [1, heads, tokens, dim]."""


@dataclass
class Row:
    """The sequences of a packed row, with so many ``new`` tokens and ``num_kv`` keys each.

    By kind of layer, ``plans`` has their calls. If the ``batch`` has places, layers read keys there. New ones are at
    ``written`` places int64 [sequences]. No sequence has the places in ``spare``.
    """

    batch: Batch
    new: Sequence[int]
    num_kv: Sequence[int]
    written: torch.Tensor | None = None
    spare: range = range(0)
    plans: dict[Hashable, Plan] = field(default_factory=dict)

    @cached_property
    def runs(self) -> list[list[range]]:
        """Each sequence's keys in what layers have cached. In the whole cache, the last run has those behind too."""
        if self.batch.places is not None:
            return self.batch.places
        return [[range(*edges)] for edges in pairwise(accumulate(self.num_kv, initial=0))]

    @property
    def room(self) -> int:
        """Keys that each sequence may get in place."""
        return min(sum(map(len, runs)) - length for runs, length in zip(self.runs, self.num_kv, strict=True))

    def sequence(self, query: torch.Tensor, cached: Cached, number: int) -> States:
        """The states of one sequence, of the ``query`` [1, heads, tokens, dim] of all and what layers have ``cached``
        [kv_heads, keys, dim]."""
        if len(self.new) > 1:
            query = query[:, :, self.batch.segments[number].query]
        (keys, values), runs, length = cached, self.runs[number], self.num_kv[number]
        if len(runs) == 1:
            first = runs[0].start
            return query, keys[None].narrow(2, first, length), values[None].narrow(2, first, length)
        parts = [slice(run.start, run.stop) for run in part_of(runs, range(length))]
        keys, values = (torch.cat([states[None, :, part] for part in parts], 2) for states in cached)
        return query, keys, values


class Plan(NamedTuple):
    """The calls of one step: ``shared`` ones, and sequences ``alone`` by number and reading.

    A reading of None is decided in each layer. ``order`` brings outputs into the order of the sequences, unless they
    have it. ``ahead`` counts the steps behind this one that have the same calls.
    """

    shared: SharedCalls
    alone: list[tuple[int, Reading | None]]
    order: torch.Tensor | None
    ahead: int = 0

    def attend(
        self,
        row: Row,
        query: torch.Tensor,
        cached: Cached,
        scaling: float,
        decided: Callable[[Row, int, States], torch.Tensor],
    ) -> torch.Tensor:
        """Output [1, tokens, heads, value dim] of the sequences of ``row``. Tensors are as in ``Row.sequence``.

        Without a reading, that of a sequence is ``decided`` [1, heads, tokens, value dim].
        """
        attended = self.shared.attend(query, cached, scaling)
        for number, reading in self.alone:
            states = row.sequence(query, cached, number)
            own = decided(row, number, states) if reading is None else read(*states, scaling, reading)
            attended.append(own.transpose(1, 2))
        joined = attended[0] if len(attended) == 1 else torch.cat(attended, 1)
        return (joined if self.order is None else joined.index_select(1, self.order)).contiguous()


@dataclass
class Decoding:
    """The ``plan`` of layers of one kind for ``row``. It serves the ``left`` steps behind that too.

    Sums have ``rings``, which layers keep from plan to plan.
    """

    rings: Rings | None = None
    plan: Plan | None = None
    row: Row | None = None
    left: int = 0

    def goes_on(self, row: Row) -> bool:
        """True if ``row`` is the next step of the same sequences and has the plan now, which serves it."""
        plan, before = self.plan, self.row
        self.plan, self.row = None, None
        if plan is None or before is None or not self.left or row.room < self.left - 1:
            return False
        if not row.batch.follows(before.batch):
            return False
        plan.shared.begin_next()
        self.plan, self.row, self.left = plan, row, self.left - 1
        return True

    def keep(self, plan: Plan, row: Row) -> None:
        """Have a new ``plan``, made for ``row``."""
        self.plan, self.row, self.left = plan, row, plan.ahead
