"""SQLite: connections to the file that was opened, and to no other that takes its place."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event


class DatabaseFile:
    """The file behind a path, made where none is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            path.touch()
        self._inode = path.stat().st_ino

    def is_there(self) -> bool:
        """True if the path is still this file: SQLite goes on writing into a deleted one."""
        try:
            return self.path.stat().st_ino == self._inode
        except OSError:
            return False

    def connection(self, busy_s: float) -> sqlite3.Connection:
        """A new connection, which waits ``busy_s`` seconds for another's transaction.

        Raises:
            sqlite3.OperationalError: when the file is gone. SQLite would make an empty one, and stay with that.
        """
        uri = f"{self.path.absolute().as_uri()}?mode=rw"
        connection = sqlite3.connect(uri, uri=True, timeout=busy_s, check_same_thread=False)
        if not self.is_there():
            connection.close()
            raise sqlite3.OperationalError(f"the file {self.path} was removed or replaced")
        return connection


def opened(url: URL, file: DatabaseFile, busy_s: float, **pool: Any) -> Engine:
    """Connections to ``file``, with transactions that are on disk when they end."""
    engine = create_engine(url, creator=lambda: file.connection(busy_s), **pool)

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # transactions are begun below, and not by Python's module
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        immediate = connection.get_execution_options().get("immediate")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")

    return engine
