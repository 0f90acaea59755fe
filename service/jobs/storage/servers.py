"""Jobs that wait for a server like the one that accepted them: of the same weights, numerics and code.

A server of another setup would measure other numbers under the same name. So it leaves waiting jobs alone as long as
a server lives that takes them. While jobs are unfinished, servers renew the leases of their rows.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import NamedTuple

from sqlalchemy import ColumnElement, and_, delete, exists, false, or_, select, update
from sqlalchemy.orm import Session

from service.jobs.address import setup_digest
from service.jobs.database.statements import inserted
from service.jobs.database.tables import Job, Server
from service.jobs.records import UNFINISHED
from service.jobs.storage.abandoned import is_gone
from service.jobs.storage.units import now

ACCEPTED_S = 30.0
"""Seconds for which a new job is left to servers of its setup in any case. Their rows are there by then."""


class Seen(NamedTuple):
    """Unfinished jobs at one moment. ``models`` are those of jobs that this server can serve. ``left`` is true for a
    job that another living server takes, and ``ours`` for one that this server takes at any time."""

    models: list[str]
    left: ColumnElement[bool]
    ours: ColumnElement[bool]


class Servers:
    """The server ``owner`` among those of its database. ``versions`` are its models, with a version for each;
    ``refused`` are jobs that it cannot plan: its limits or its memory are smaller."""

    def __init__(self, owner: str, versions: Mapping[str, str], *, only_own: bool) -> None:
        self._owner, self._versions, self._only_own = owner, dict(versions), only_own
        self.refused: frozenset[int] = frozenset()

    def setup(self, models: str) -> str | None:
        """The setup for models, as a job has them; None unless all are served."""
        return setup_digest(json.loads(models), self._versions)

    def seen(self, session: Session, model: str | None = None) -> Seen:
        """The unfinished jobs now; ``models`` are those with ``model``."""
        every = session.scalars(select(Job.models).where(Job.state.in_(UNFINISHED)).distinct()).all()
        own = {models: setup for models in every if (setup := self.setup(models)) is not None}
        served = [models for models in own if model is None or model in json.loads(models)]
        new = and_(Job.state == "queued", Job.lease_until.is_not(None), Job.lease_until > now(session))
        others = select(Server).where(Server.owner != self._owner, Server.lease_until > now(session))
        taken = [
            _takes(
                models, setup_digest(json.loads(models), server.versions), server.refused, server.only_own, server.owner
            )
            for server in session.scalars(others)
            if not is_gone(server.owner)
            for models in every
        ]
        ours = [_takes(models, setup, self.refused) for models, setup in own.items()]
        return Seen(served, or_(new, *taken), or_(Job.setup.is_(None), *ours))

    def hold(self, session: Session, lease_s: float) -> None:
        """Renew the row of this server."""
        values = {
            "owner": self._owner,
            "versions": self._versions,
            "only_own": self._only_own,
            "refused": sorted(self.refused),
            "lease_until": now(session, lease_s),
        }
        session.execute(inserted(session, Server, values, replaces=True))

    def forget_refused(self, session: Session) -> None:
        """Leave out refused jobs that no longer wait."""
        if self.refused:
            waiting = select(Job.number).where(Job.number.in_(self.refused), Job.state == "queued")
            self.refused = frozenset(session.scalars(waiting))

    def leave(self, session: Session) -> None:
        """End at once, so that nobody waits for the lease: of this server, and of new jobs that it accepted."""
        session.execute(delete(Server).where(Server.owner == self._owner))
        accepted = and_(Job.state == "queued", Job.added_by == self._owner, Job.lease_until.is_not(None))
        numbers = list(session.scalars(select(Job.number).where(accepted).order_by(Job.number).with_for_update()))
        session.execute(update(Job).where(Job.number.in_(numbers)).values(lease_until=None))


def any_job_unfinished(session: Session) -> bool:
    """True if a job is queued or running."""
    return bool(session.scalar(select(exists().where(Job.state.in_(UNFINISHED)))))


def remove_lapsed(session: Session) -> None:
    """Remove the rows of servers that did not renew their leases."""
    session.execute(delete(Server).where(Server.lease_until < now(session)))


def _takes(
    models: str, setup: str | None, refused: Collection[int], only_own: bool = False, owner: str = ""
) -> ColumnElement[bool]:
    """True for a job on these ``models`` that a server takes. With ``only_own``, ``owner`` has accepted it."""
    if setup is None:
        return false()
    taken = and_(Job.models == models, Job.setup == setup)
    if refused:
        taken = and_(taken, Job.number.not_in(refused))
    return and_(taken, Job.added_by == owner) if only_own else taken
