"""The calls of a decoding step, and those that layers keep for the steps behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from patches.attention.decode.reading import Reading
from patches.attention.decode.shared import SharedCalls
from patches.attention.decode.sums.rings import Rings
from patches.batch.segments import Batch

STEPS = 8
"""Steps that a plan serves. With more, each reads more keys in vain."""


class Plan(NamedTuple):
    """The calls of one step: ``shared`` ones, and sequences ``alone`` by number and reading.

    A reading of None is decided in each layer. ``order`` brings outputs into the order of the sequences, unless they
    have it. ``ahead`` counts the steps behind this one that have the same calls.
    """

    shared: SharedCalls
    alone: list[tuple[int, Reading | None]]
    order: torch.Tensor | None
    ahead: int = 0


@dataclass
class Decoding:
    """The ``rings`` and the ``plan`` that layers of one kind keep from step to step.

    The plan serves ``batch``, and ``left`` steps behind it. Only sums have rings.
    """

    rings: Rings | None
    plan: Plan | None = None
    batch: Batch | None = None
    left: int = 0

    def goes_on(self, batch: Batch, room: int) -> Plan | None:
        """The plan, if ``batch`` is the next step of the same sequences and the plan serves it.

        Each sequence has ``room`` for so many more keys in place.
        """
        plan, before = self.plan, self.batch
        self.plan, self.batch = None, None
        if plan is None or before is None or not self.left or room < self.left - 1 or not batch.follows(before):
            return None
        plan.shared.begin_next()
        self.plan, self.batch, self.left = plan, batch, self.left - 1
        return plan

    def keep(self, plan: Plan, batch: Batch) -> None:
        """Have a new ``plan``, made for ``batch``."""
        self.plan, self.batch, self.left = plan, batch, plan.ahead
