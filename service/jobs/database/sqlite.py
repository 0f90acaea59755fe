"""SQLite: connections to the files that were opened, and to no others that take their places."""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event


class DatabaseFile:
    """The file behind a path, made where none is, and its log ``-wal``, which has the newest transactions.

    A connection stays open: SQLite removes the log when the last one is closed, and makes another.
    """

    def __init__(self, path: Path, busy_s: float) -> None:
        self.path, self._busy_s = path, busy_s
        self._log, self._lock = Path(f"{path.resolve()}-wal"), Lock()
        if not path.exists():
            path.touch()
        self._opened, self._logged = _identity(path), None
        self._connection = self.connection()
        try:
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()  # opens the log
        except BaseException:
            self._connection.close()
            raise
        self._logged = _identity(self._log)

    def what_is_gone(self) -> Path | None:
        """The file, or its log, if its path is another one by now: SQLite goes on writing into deleted ones."""
        if _identity(self.path) != self._opened:
            return self.path
        if self._logged is None or (found := _identity(self._log)) == self._logged:
            return None
        if found is None:
            self.checkpoint()  # the log that was deleted has transactions that the file has not
        return self._log

    def connection(self) -> sqlite3.Connection:
        """A new connection, which waits ``busy_s`` seconds for another's transaction.

        Raises:
            sqlite3.OperationalError: when a file is gone. SQLite would make an empty one, and stay with that.
        """
        uri = f"{self.path.absolute().as_uri()}?mode=rw"
        connection = sqlite3.connect(uri, uri=True, timeout=self._busy_s, check_same_thread=False)
        if (gone := self.what_is_gone()) is not None:
            connection.close()
            raise sqlite3.OperationalError(f"the file {gone} was removed or replaced")
        return connection

    def checkpoint(self) -> None:
        """Move what the log has into the file, without waiting for anybody. A copy of the file has that much.

        A full disk leaves it for the next time.
        """
        with self._lock, suppress(sqlite3.Error):
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def close(self) -> None:
        self._connection.close()


def _identity(path: Path) -> tuple[int, int] | None:
    """None where nothing is."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def opened(url: URL, file: DatabaseFile, **pool: Any) -> Engine:
    """Connections to ``file``, with transactions that are on disk when they end."""
    engine = create_engine(url, creator=file.connection, **pool)

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
