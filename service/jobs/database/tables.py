"""The tables, as the newest migration leaves them (a test compares)."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    DateTime,
    Dialect,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Text,
    TypeDecorator,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from service.jobs.records import JobState

VERSION = "0009"
"""The newest migration. A database of this version is opened without Alembic, whose import takes a while."""

BigId = BigInteger().with_variant(Integer, "sqlite")
"""SQLite counts rows by itself in INTEGER columns only."""


class Moment(TypeDecorator[datetime]):
    """An aware datetime in UTC, also on SQLite, which knows no zones."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def written(value: Any) -> str:
    """JSON as it is stored: short, and readable in any alphabet."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class Json(TypeDecorator[Any]):
    """JSON as text: numbers come back to the bit, and PostgreSQL's own type takes no NUL characters."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else written(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)


class Base(DeclarativeBase):
    pass


class Job(Base):
    """One evaluation to be done. ``number`` orders jobs by age.

    ``models`` is the JSON list of the served models that it needs, sorted. ``owner`` is the process that plans or
    completes it; a planned job has none. ``plan`` is the digest of its units' keys. Processes with another plan leave
    the job alone until ``lease_until``. ``added_by`` is the process that took the request. ``setup`` is the digest of
    its code and models. A server of another setup plans the job when none of this one is left. A queued job is left to
    its setup until ``lease_until`` in any case. ``claims`` counts how often a process left it unfinished since a unit
    was last finished; ``last_unit`` is the highest number that a finished unit of it ever had.
    ``idempotency_key`` is what its tenant called the submission, if anything. ``request_bytes`` is what the request
    takes up. ``listed`` is a long request without its documents; null for a short one. ``queued_at`` is the time of
    the submission, or of the last resumption.
    """

    __tablename__ = "jobs"
    __table_args__ = (
        Index("jobs_waiting", "state", "tenant", "number"),
        Index("jobs_of_tenant", "tenant", "number"),
        Index("jobs_by_idempotency_key", "tenant", "idempotency_key", unique=True),
    )

    number: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(32), unique=True)
    tenant: Mapped[str] = mapped_column(Text)
    evaluation: Mapped[str] = mapped_column(Text)
    model: Mapped[str | None] = mapped_column(Text)
    models: Mapped[str] = mapped_column(Text)
    state: Mapped[JobState] = mapped_column(String(16))
    created_at: Mapped[datetime] = mapped_column(Moment)
    queued_at: Mapped[datetime | None] = mapped_column(Moment)
    started_at: Mapped[datetime | None] = mapped_column(Moment)
    finished_at: Mapped[datetime | None] = mapped_column(Moment)
    units_total: Mapped[int]
    units_done: Mapped[int] = mapped_column(default=0)
    units_reused: Mapped[int] = mapped_column(default=0)
    tokens_total: Mapped[int] = mapped_column(BigInteger)
    tokens_done: Mapped[int] = mapped_column(BigInteger, default=0)
    tokens_reused: Mapped[int] = mapped_column(BigInteger, default=0)
    seconds: Mapped[float] = mapped_column(default=0.0)
    added_by: Mapped[str] = mapped_column(Text)
    owner: Mapped[str | None] = mapped_column(Text)
    lease_until: Mapped[datetime | None] = mapped_column(Moment)
    plan: Mapped[str | None] = mapped_column(String(64))
    setup: Mapped[str | None] = mapped_column(String(64))
    claims: Mapped[int] = mapped_column(default=0)
    last_unit: Mapped[int] = mapped_column(default=0)
    idempotency_key: Mapped[str | None] = mapped_column(String(255))
    error: Mapped[dict[str, str] | None] = mapped_column(Json)
    request: Mapped[dict[str, Any]] = mapped_column(Json, deferred=True)
    request_bytes: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    listed: Mapped[dict[str, Any] | None] = mapped_column(Json, deferred=True)


class Server(Base):
    """A process that works on jobs, until ``lease_until``. ``versions`` are those of its models, by name. ``only_own``:
    it leaves out what others accepted. ``refused`` are the jobs that it cannot plan."""

    __tablename__ = "servers"

    owner: Mapped[str] = mapped_column(Text, primary_key=True)
    versions: Mapped[dict[str, str]] = mapped_column(Json)
    only_own: Mapped[bool]
    refused: Mapped[list[int]] = mapped_column(Json)
    lease_until: Mapped[datetime] = mapped_column(Moment)


class UnfinishedUnit(Base):
    """A unit of a planned job, without an outcome. ``owner`` runs it until ``lease_until``; ``tokens_done`` is its
    progress at the owner's last beat. Jobs that share a unit do not run it at the same time. No two rows of one key
    have an owner."""

    __tablename__ = "unfinished_units"
    __table_args__ = (
        Index(
            "unfinished_units_claimed",
            "key",
            unique=True,
            sqlite_where=text("owner IS NOT NULL"),
            postgresql_where=text("owner IS NOT NULL"),
        ),
    )

    job: Mapped[int] = mapped_column(BigId, ForeignKey("jobs.number", ondelete="CASCADE"), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    key: Mapped[str] = mapped_column(String(64))
    model: Mapped[str] = mapped_column(Text)
    owner: Mapped[str | None] = mapped_column(Text)
    lease_until: Mapped[datetime | None] = mapped_column(Moment)
    tokens_done: Mapped[int] = mapped_column(BigInteger, default=0)


class FinishedUnit(Base):
    """A unit of a job whose outcome is known. ``position`` is its place in the plan, ``number`` in the order of
    finishing. Neither occurs twice in a job, and published numbers are never reused."""

    __tablename__ = "finished_units"
    __table_args__ = (UniqueConstraint("job", "position"), Index("finished_units_by_key", "key"))

    job: Mapped[int] = mapped_column(BigId, ForeignKey("jobs.number", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    position: Mapped[int]
    key: Mapped[str] = mapped_column(String(64))
    label: Mapped[str] = mapped_column(Text)
    name: Mapped[str] = mapped_column(Text)
    length: Mapped[int]
    tokens: Mapped[int] = mapped_column(BigInteger)
    reused: Mapped[bool]
    seconds: Mapped[float]
    summary: Mapped[dict[str, float]] = mapped_column(Json)


class StoredOutcome(Base):
    """The outcome of a unit, under its address."""

    __tablename__ = "outcomes"
    __table_args__ = (Index("outcomes_by_use", "used_at", "size"),)

    key: Mapped[str] = mapped_column(String(64), primary_key=True)
    checksum: Mapped[str] = mapped_column(String(64))
    size: Mapped[int] = mapped_column(BigInteger)
    used_at: Mapped[datetime] = mapped_column(Moment)
    data: Mapped[bytes] = mapped_column(LargeBinary, deferred=True)


class StoredResult(Base):
    """The result of a ``job``, or of a request that was answered at once: JSON, packed with gzip."""

    __tablename__ = "results"
    __table_args__ = (Index("results_of_tenant", "tenant", "job", "created_at"),)

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant: Mapped[str] = mapped_column(Text)
    evaluation: Mapped[str] = mapped_column(Text)
    job: Mapped[int | None] = mapped_column(BigId, ForeignKey("jobs.number", ondelete="CASCADE"), unique=True)
    created_at: Mapped[datetime] = mapped_column(Moment)
    size: Mapped[int] = mapped_column(BigInteger)
    data: Mapped[bytes] = mapped_column(LargeBinary, deferred=True)


class StoredPolicy(Base):
    """The policy of ``auto`` that a tenant's last calibration of a model made. ``fingerprint`` is the model's hash."""

    __tablename__ = "policies"

    tenant: Mapped[str] = mapped_column(Text, primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(64), primary_key=True)
    created_at: Mapped[datetime] = mapped_column(Moment)
    policy: Mapped[dict[str, Any]] = mapped_column(Json)


class KeptProducts(Base):
    """The products that a kind of linear layers has on a kind of processor. ``kind`` names both in JSON."""

    __tablename__ = "products"

    kind: Mapped[str] = mapped_column(Text, primary_key=True)
    choices: Mapped[dict[str, Any]] = mapped_column(Json)
