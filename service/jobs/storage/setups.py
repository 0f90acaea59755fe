"""Jobs that wait for a server like the one that accepted them: of the same weights, hardware and code.

A server of another setup would measure other numbers under the same name. So it leaves waiting jobs alone as long as
a server of their setup lives. Such servers renew the lease of the oldest waiting job of each setup that they have.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sqlalchemy import ColumnElement, and_, case, func, or_, select
from sqlalchemy.orm import Session

from service.jobs.address import setup_of
from service.jobs.database.tables import Job
from service.jobs.records import UNFINISHED
from service.jobs.storage.units import now

ACCEPTED_S = 30.0
"""Seconds from a job's request until its setup counts as gone, unless a server renews the lease."""


@dataclass(frozen=True)
class Seen:
    """Unfinished jobs at one moment. ``models`` are the texts of served sets of models. ``alive`` are the setups of
    living servers, ``others`` those that this server has not. ``refused`` are jobs that it cannot plan."""

    models: list[str]
    alive: set[str]
    others: set[str]
    refused: Collection[int]

    def may_plan(self) -> ColumnElement[bool]:
        """False for a job that is left to servers of another setup, or to those that can plan it."""
        refused = and_(Job.number.in_(self.refused), Job.setup.in_(self.alive))
        return and_(or_(Job.setup.is_(None), Job.setup.not_in(self.others)), ~refused)


class Setups:
    """The setups of a server with these ``fingerprints`` of its models, one for every set of them. ``refused`` are jobs
    of its setup that it cannot plan, with their setups: its limits or its memory are smaller."""

    def __init__(self, fingerprints: Mapping[str, str]) -> None:
        self._fingerprints = dict(fingerprints)
        self.refused: dict[int, str] = {}

    def of(self, models: str) -> str | None:
        """The setup for models, as a job has them; None unless all are served."""
        names = json.loads(models)
        if not self._fingerprints.keys() >= set(names):
            return None
        return setup_of({name: self._fingerprints[name] for name in names})

    def seen(self, session: Session, model: str | None = None) -> Seen:
        """The unfinished jobs now; ``models`` are those with ``model``."""
        waits = or_(Job.state == "queued", Job.owner.is_not(None))
        alive = func.max(case((and_(waits, Job.lease_until > now(session)), 1), else_=0))
        query = select(Job.models, Job.setup, alive).where(Job.state.in_(UNFINISHED)).group_by(Job.models, Job.setup)
        found = [(models, setup, bool(lives)) for models, setup, lives in session.execute(query)]
        own = {models: self.of(models) for models, _, _ in found}
        living = {(models, setup) for models, setup, lives in found if lives and setup is not None}
        served = [models for models, setup in own.items() if setup and (model is None or model in json.loads(models))]
        others = {setup for models, setup in living if setup != own[models]}
        return Seen(served, {setup for _, setup in living}, others, list(self.refused))

    def oldest(self, session: Session, only: ColumnElement[bool]) -> list[int]:
        """The oldest waiting job of each setup of this server, of those that satisfy ``only``. Setups of refused jobs
        are left out: their leases are those of servers that can plan them."""
        if self.refused:
            queued = select(Job.number).where(Job.number.in_(self.refused), Job.state == "queued")
            waiting = set(session.scalars(queued))
            self.refused = {number: setup for number, setup in self.refused.items() if number in waiting}
        query = select(Job.models, Job.setup, func.min(Job.number)).where(Job.state == "queued", only)
        found = session.execute(query.where(Job.setup.is_not(None)).group_by(Job.models, Job.setup)).all()
        refused = set(self.refused.values())
        return sorted(first for models, setup, first in found if setup == self.of(models) and setup not in refused)
