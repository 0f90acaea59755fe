"""Jobs at work in this process: their plans, and the units that are left of them."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from service.evaluation.unit import Outcome
from service.jobs.planning import Planned
from service.jobs.signals import Signal
from service.jobs.storage.outcomes import pack
from service.jobs.storage.queue import Claimed, Finished


class ActiveJob:
    """``pending`` are positions by the model that they run on, ``left`` all that are not finished. ``dropped``: the
    job was cancelled or taken by another process, and its running units are cancelled."""

    def __init__(self, claimed: Claimed, planned: Planned) -> None:
        self.number, self.id, self.tenant = claimed.number, claimed.id, claimed.tenant
        self._set(planned)
        self.pending: dict[str, deque[int]] = {}
        self.left: set[int] = set()
        self.in_flight: Counter[int] = Counter()
        """Tokens done of units at work, by position."""
        self.failures: Counter[int] = Counter()
        self.running: set[asyncio.Task[Any]] = set()
        self.dropped = False

    def _set(self, planned: Planned) -> None:
        self._planned = planned
        self.plan, self.keys = planned.plan, planned.keys

    def extend(self, outcomes: Sequence[Outcome]) -> bool:
        """Add the plan's next stage, whose units are neither left nor pending yet; false after the last one."""
        extended = self._planned.extended(outcomes)
        if extended is not None:
            self._set(extended)
        return extended is not None

    def leave(self, positions: set[int]) -> None:
        """Put units back, in the plan's order."""
        self.left |= positions
        by_model: dict[str, set[int]] = {model: set(waiting) for model, waiting in self.pending.items()}
        for position in positions:
            by_model.setdefault(self.plan.units[position].subject.model, set()).add(position)
        self.pending = {model: deque(sorted(waiting)) for model, waiting in by_model.items()}

    def take(self, positions: set[int]) -> None:
        """Remove units from the queues."""
        for model, waiting in self.pending.items():
            self.pending[model] = deque(position for position in waiting if position not in positions)

    def drop(self) -> None:
        self.dropped = True
        self.pending.clear()
        for task in self.running:
            task.cancel()

    def finished(self, position: int, outcome: Outcome, seconds: float | None = None) -> Finished:
        """The record of a finished unit; with its outcome if it was measured now, in ``seconds``."""
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


class ActiveJobs:
    """Jobs by their numbers. ``in_flight`` shows clients the tokens of units at work: job id -> tokens.

    ``held`` are the jobs whose lease is renewed: the active ones, and one being planned. ``added`` fires when a job
    may be new or cancelled, ``changed`` when one gets further. ``closed``: the runner ends.
    """

    def __init__(self, in_flight: dict[str, int]) -> None:
        self.active: dict[int, ActiveJob] = {}
        self.held: set[int] = set()
        self.added, self.changed = Signal(), Signal()
        self.in_flight = in_flight
        self.closed = False

    def note_in_flight(self, job: ActiveJob) -> None:
        tokens = 0 if job.dropped else sum(job.in_flight.values())
        if tokens:
            self.in_flight[job.id] = tokens
        else:
            self.in_flight.pop(job.id, None)

    def drop(self, job: ActiveJob) -> None:
        """Cancel what runs of a job that is no longer this process's."""
        job.drop()
        self.note_in_flight(job)
        self.forget(job.number)

    def forget(self, number: int) -> None:
        self.active.pop(number, None)
        self.held.discard(number)
        self.changed.fire()
