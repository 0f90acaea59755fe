"""Connections to PostgreSQL on which no server waits for ever, neither for another one nor for an answer.

A server that is frozen within a transaction, or cut off, keeps its locks until PostgreSQL ends its session. TCP notices
neither a frozen program nor a proxy that has stopped, and a lost machine only after hours.
"""

from __future__ import annotations

from typing import Any, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.errors import _WaitTimeout  # what ``wait`` raises, from 3.3.9 on
from sqlalchemy import URL, Engine, create_engine, event

Returned = TypeVar("Returned")

SILENT_S = 20.0
"""Seconds without an answer after which a connection is given up. A lease of 30 s is renewed before its end."""

IDLE_S = 10.0
"""Seconds after which PostgreSQL ends a session that does nothing within its transaction, and frees its locks."""

OF_CONNECTIONS = {"connect_timeout": 5, "keepalives_idle": 30}
"""Parameters in seconds that the URL may set otherwise. Firewalls forget connections that are idle for minutes."""

LIMIT = "SELECT set_config(name, %s, false) FROM pg_settings WHERE name = %s AND source <> 'client'"
"""Options of the URL have the source ``client``. PgBouncer refuses limits among the parameters of a connection."""


class Answered(psycopg.Connection[Any]):
    """A connection that is closed where an answer takes longer than ``SILENT_S`` seconds.

    Raises:
        psycopg.OperationalError: from the call that waits.
    """

    def wait(self, gen: PQGen[Returned], interval: float = 0.1, timeout: float | None = None) -> Returned:
        if timeout is not None:
            return super().wait(gen, interval, timeout)
        try:
            return super().wait(gen, interval, SILENT_S)
        except _WaitTimeout:
            self.close()
            raise psycopg.OperationalError(f"no answer within {SILENT_S:g} seconds") from None


def opened(url: URL, busy_s: float, **pool: Any) -> Engine:
    """An engine whose transactions wait ``busy_s`` seconds for the locks of others, and are ended after ``IDLE_S``."""
    ours = {name: value for name, value in OF_CONNECTIONS.items() if name not in url.query}
    engine = create_engine(url, pool_pre_ping=True, connect_args=ours, **pool)

    @event.listens_for(engine, "do_connect")
    def connect(_dialect: Any, _record: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Answered:
        return Answered.connect(*args, **options)

    @event.listens_for(engine, "connect")
    def limit(connection: Answered, _: Any) -> None:
        limits = {"lock_timeout": busy_s, "idle_in_transaction_session_timeout": IDLE_S}
        for name, seconds in limits.items():
            connection.execute(LIMIT, (f"{seconds * 1000:.0f}ms", name))
        connection.commit()

    return engine
