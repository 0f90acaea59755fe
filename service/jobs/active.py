"""A job that is being worked on: its plan, and what is left of it."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import Any

from service.evaluation.unit import Outcome, Plan
from service.jobs.storage.outcomes import pack
from service.jobs.storage.queue import Claimed, Finished


class ActiveJob:
    """``pending`` are positions by the model that they run on, ``left`` all that are not finished. ``dropped``: it is
    no longer ours, and what still runs of it is of no use."""

    def __init__(self, claimed: Claimed, plan: Plan, keys: list[str]) -> None:
        self.number, self.id, self.tenant = claimed.number, claimed.id, claimed.tenant
        self.plan, self.keys = plan, keys
        self.pending: dict[str, deque[int]] = {}
        self.left: set[int] = set()
        self.in_flight: Counter[int] = Counter()
        """Tokens done of units at work, by position."""
        self.failures: Counter[int] = Counter()
        self.running: set[asyncio.Task[Any]] = set()
        self.dropped = False

    def leave(self, positions: set[int]) -> None:
        """These are still to be done, in the plan's order."""
        self.left |= positions
        by_model: dict[str, set[int]] = {model: set(waiting) for model, waiting in self.pending.items()}
        for position in positions:
            by_model.setdefault(self.plan.units[position].subject.model, set()).add(position)
        self.pending = {model: deque(sorted(waiting)) for model, waiting in by_model.items()}

    def take(self, positions: set[int]) -> None:
        """These wait no longer."""
        for model, waiting in self.pending.items():
            self.pending[model] = deque(position for position in waiting if position not in positions)

    def drop(self) -> None:
        self.dropped = True
        self.pending.clear()
        for task in self.running:
            task.cancel()

    def finished(self, position: int, outcome: Outcome, seconds: float | None = None) -> Finished:
        """What is recorded of a unit: its outcome too if that was measured now, in ``seconds``."""
        unit = self.plan.units[position]
        return Finished(
            position=position,
            key=self.keys[position],
            label=unit.subject.label,
            name=unit.name,
            length=unit.length,
            tokens=unit.tokens,
            summary=unit.summary(outcome),
            seconds=seconds or 0.0,
            data=None if seconds is None else pack(outcome),
        )
