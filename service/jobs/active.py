"""Jobs at work in this process: their plans, and the units that it has claimed of them."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any

from service.evaluation.unit import Outcome
from service.jobs.planning import Planned
from service.jobs.records import AtWork
from service.jobs.signals import Signal
from service.jobs.storage.claims import Claimed
from service.jobs.storage.outcomes import pack
from service.jobs.storage.units import ClaimedUnit, Finished

CLAIM_S = 1.0
"""Seconds of work that one claim takes at most, unless a single unit takes longer."""

MOST_CLAIMED = 64
"""Units of one claim."""


class ActiveJob:
    """``claimed`` are units that this process has claimed and not begun, by the model that they run on. ``dropped``:
    the job has ended or is another process's, and its running units are cancelled."""

    def __init__(self, claimed: Claimed, planned: Planned) -> None:
        self.number, self.id, self.tenant = claimed.number, claimed.id, claimed.tenant
        self._set(planned)
        self.claimed: defaultdict[str, deque[ClaimedUnit]] = defaultdict(deque)
        self.in_flight: dict[int, AtWork] = {}
        """Units at work, by position."""
        self.failures: Counter[int] = Counter()
        self.running: set[asyncio.Task[Any]] = set()
        self.dropped = False
        self._unit_s: dict[str, float] = {}

    def _set(self, planned: Planned) -> None:
        self._planned = planned
        self.plan, self.keys, self.digest = planned.plan, planned.keys, planned.digest

    def place(self, position: int) -> str:
        """A unit in words: its method, its length and its document or sample."""
        unit = self.plan.units[position]
        return f"{unit.subject.label}, length {unit.length}, {unit.name}"

    def extend(self, outcomes: Sequence[Outcome]) -> bool:
        """Add the plan's next stage; false after the last one."""
        extended = self._planned.extended(outcomes)
        if extended is not None:
            self._set(extended)
        return extended is not None

    def rows(self, positions: Iterable[int]) -> list[tuple[int, str, str]]:
        """(position, key, model) of units, in the plan's order."""
        return [(p, self.keys[p], self.plan.units[p].subject.model) for p in sorted(positions)]

    def batch(self, model: str) -> int:
        """Units that the next claim for ``model`` may take: one until the seconds of a unit are known."""
        unit_s = self._unit_s.get(model, CLAIM_S)
        return max(1, min(MOST_CLAIMED, int(CLAIM_S / max(unit_s, 1e-9))))

    def took(self, model: str, seconds: float) -> None:
        """Note the seconds of a measured unit, in a moving average."""
        self._unit_s[model] = (self._unit_s.get(model, seconds) + seconds) / 2

    def drop(self) -> None:
        self.dropped = True
        self.claimed.clear()
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
    """Jobs by their numbers. ``in_flight`` shows clients the units at work, by job id and position.

    ``leased`` are the jobs whose leases are renewed: the active ones, and those being planned. ``added`` fires when a
    job may be new or cancelled, ``changed`` when one gets further. ``closed``: the runner ends.
    """

    def __init__(self, in_flight: dict[str, dict[int, AtWork]]) -> None:
        self.active: dict[int, ActiveJob] = {}
        self.leased: set[int] = set()
        self.added, self.changed = Signal(), Signal()
        self.in_flight = in_flight
        self.closed = False

    def note_in_flight(self, job: ActiveJob) -> None:
        if job.in_flight and not job.dropped:
            self.in_flight[job.id] = dict(job.in_flight)
        else:
            self.in_flight.pop(job.id, None)

    def progress(self) -> dict[tuple[int, int], int]:
        """Tokens done of units at work: (job, position) -> tokens."""
        found: dict[tuple[int, int], int] = {}
        for job in self.active.values():
            found |= {(job.number, position): unit.tokens for position, unit in job.in_flight.items()}
        return found

    def drop(self, job: ActiveJob) -> None:
        """Cancel what runs of a job that is no longer this process's."""
        job.drop()
        self.note_in_flight(job)
        self.forget(job.number)

    def forget(self, number: int) -> None:
        self.active.pop(number, None)
        self.leased.discard(number)
        self.changed.fire()
