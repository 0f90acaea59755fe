"""Opening the database: it is refused, and left as it is, unless it is ours, undamaged and writable."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs
from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, false, inspect, make_url, text
from sqlalchemy.exc import (
    ArgumentError,
    DatabaseError,
    DataError,
    InterfaceError,
    InternalError,
    OperationalError,
    SQLAlchemyError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import Session

from service.jobs.database import sqlite
from service.jobs.database.sqlite import DatabaseFile
from service.jobs.database.tables import VERSION, Base

if TYPE_CHECKING:
    from alembic.config import Config

VERSION_TABLE = "ropeway_version"
BUSY_S = 5.0
"""Seconds that a transaction waits for another process."""

CONNECTIONS = 8
"""Of one process, unless it is opened with another number."""

LOCK = 0x726F7065776179
"""PostgreSQL's advisory lock during migrations: "ropeway"."""

_migrating = threading.Lock()  # alembic's context is one per process


class StoreUnusable(RuntimeError):
    """The database cannot hold jobs; the message says which, why, and what to do."""

    def __init__(self, url: str, why: str) -> None:
        super().__init__(
            f"the database of jobs {url} cannot be used: {why}. It was left as it is: repair it, move it away, or "
            "name another with ROPEWAY_DATABASE_URL"
        )


class StoreOutOfReach(RuntimeError):
    """The database does not answer now: locked, frozen, damaged or gone. The same call may work later."""


class NotStorable(ValueError):
    """The database does not take a value, as PostgreSQL takes no NUL in texts. The same call never works."""


class Database:
    """One open database. SQLite is used by one writer at a time, who waits at the beginning and never in between."""

    def __init__(self, url: str, connections: int = CONNECTIONS) -> None:
        """Raises:
        StoreUnusable: when it is not ours, damaged, newer than this program, read-only or out of reach.
        """
        parsed = _parsed(url)
        self.url = _shown(parsed)
        try:
            self._reads, self._file = _engine(parsed, connections)
            self._writes = self._reads.execution_options(immediate=True)
            try:
                with _migrating, self._writes.begin() as connection:
                    _migrate(connection)
                self.checkpoint()
            except BaseException:
                self.close()
                raise
        except (SQLAlchemyError, sqlite3.Error, OSError, ImportError, _NotOursError) as error:
            raise StoreUnusable(self.url, _reason(error)) from error

    @property
    def engine(self) -> Engine:
        return self._reads

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A transaction that sees one state of everything.

        Raises:
            StoreOutOfReach: when the database does not answer.
            NotStorable: when it refuses a value.
        """
        with self._reached(), Session(self._reads) as session, session.begin():
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A transaction that is on disk when the block is left.

        Raises:
            StoreOutOfReach: when the database does not answer.
            NotStorable: when it refuses a value.
        """
        with self._reached(), Session(self._writes) as session, session.begin():
            yield session

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """One exception for all that can befall a database; what our own statements violate is passed on."""
        if self._file is not None and (gone := self._file.what_is_gone()) is not None:
            raise StoreOutOfReach(f"the file {gone} was removed or replaced while it was open")
        try:
            yield
        except (OperationalError, InterfaceError, InternalError, PoolTimeoutError) as error:
            raise StoreOutOfReach(_reason(error)) from error
        except DataError as error:
            raise NotStorable(f"the database does not take a value: {_reason(error)}") from error
        except DatabaseError as error:
            if type(error) is not DatabaseError:
                raise
            raise StoreOutOfReach(_reason(error)) from error

    def checkpoint(self) -> None:
        """Bring an SQLite file up to its log, which has the newest transactions."""
        if self._file is not None:
            self._file.checkpoint()

    def close(self) -> None:
        self._reads.dispose()
        if self._file is not None:
            self._file.close()


def _reason(error: Exception) -> str:
    told, _, _ = str(getattr(error, "orig", None) or error).partition("\nCONTEXT:")  # PostgreSQL's, of our statement
    return told.strip().rstrip(".")


class _NotOursError(Exception):
    """The contents cannot be used; the message says why."""


def default_url() -> str:
    """The user's own database, in a folder that is made when it is needed.

    Raises:
        StoreUnusable: when the folder cannot be made.
    """
    folder = Path(platformdirs.user_data_dir("ropeway", appauthor=False))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreUnusable(str(folder), f"its folder cannot be made ({error})") from error
    return URL.create("sqlite", database=str(folder / "ropeway.db")).render_as_string()


def _parsed(url: str) -> URL:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        why = "this is not a database URL" if isinstance(error, ArgumentError) else "its port is no number"
        raise StoreUnusable("(not shown: it may hold a password)", why) from None
    name = parsed.drivername.partition("+")[0]
    if name in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    if name != "sqlite":
        raise StoreUnusable(_shown(parsed), "only sqlite:///PATH and postgresql://HOST/NAME are supported")
    if parsed.query or parsed.database in (None, "", ":memory:"):
        raise StoreUnusable(_shown(parsed), "jobs outlive the server: sqlite:///PATH must name a file, and no options")
    return parsed.set(drivername="sqlite")


def _shown(url: URL) -> str:
    """Without the password; options may hold one too."""
    return url.set(query={}).render_as_string(hide_password=True)


def _refuse_strangers(url: URL) -> None:
    """Check an SQLite file, opened read-only.

    Raises:
        _NotOursError: when it is no database of ours; sqlite3.Error when it cannot be read.
    """
    path = Path(str(url.database)).absolute()
    if not path.parent.is_dir():
        raise _NotOursError(f"the folder {path.parent} does not exist")
    if path.is_dir():
        raise _NotOursError("it is a folder: name a file in it")
    if not path.exists() or path.stat().st_size == 0:
        return
    log, index = (Path(f"{path.resolve()}-{end}") for end in ("wal", "shm"))
    if index.exists() and not log.exists():  # SQLite removes them in the other order
        raise _NotOursError(f"{log.name} was removed: stop all servers of the file, then remove {index.name}")
    uri = f"{path.as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_S)) as connection:
        if (found := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise _NotOursError(f"the file is damaged ({found})")
    engine = create_engine("sqlite://", creator=lambda: sqlite3.connect(uri, uri=True), poolclass=NullPool)
    with engine.connect() as readonly:
        _checked(readonly)


def _engine(url: URL, connections: int) -> tuple[Engine, DatabaseFile | None]:
    """Connections, and the file of an SQLite database."""
    pool: dict[str, Any] = {"pool_size": connections, "max_overflow": 4, "pool_timeout": BUSY_S}
    if url.get_backend_name() == "postgresql":
        from service.jobs.database import postgresql  # needs the extra

        return postgresql.opened(url, BUSY_S, **pool), None
    _refuse_strangers(url)
    file = DatabaseFile(Path(str(url.database)), BUSY_S)
    return sqlite.opened(url, file, **pool), file


def _config(connection: Connection | None = None) -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", "service.jobs.database:migrations")
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def _migrate(connection: Connection) -> None:
    """Bring the tables to what this program knows, alone and all at once."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SET LOCAL lock_timeout = 0"))  # migrations of another process may take long
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
    if not _checked(connection):
        _upgrade(connection)
        _checked(connection)
    # Changes nothing, and fails where nothing may be changed: SQLite begins a transaction on a read-only file.
    for table in Base.metadata.sorted_tables:
        connection.execute(table.delete().where(false()))


def _upgrade(connection: Connection) -> None:
    """Raises:
    _NotOursError: when the migrations do not fit together.
    """
    from alembic import command
    from alembic.util import CommandError

    logging.getLogger("alembic").setLevel(logging.WARNING)
    try:
        command.upgrade(_config(connection), "head")
    except CommandError as error:
        raise _NotOursError(str(error)) from error


def _checked(connection: Connection) -> bool:
    """True if the tables are there and the newest.

    Raises:
        _NotOursError: when they are not ours, or their version is unknown.
    """
    names = set(inspect(connection).get_table_names())
    if not names:
        return False
    if VERSION_TABLE not in names:
        raise _NotOursError(f"it has tables of another program ({', '.join(sorted(names)[:5])})")
    version = connection.scalar(text(f"SELECT version_num FROM {VERSION_TABLE}"))
    if version != VERSION:
        from alembic.script import ScriptDirectory

        known = {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}
        if version not in known:
            why = f"its version {version} is unknown: a newer ropeway made it. Start that one, or restore a backup"
            raise _NotOursError(why)
        return False
    columns = inspect(connection).get_multi_columns()  # one query, where each table's own takes milliseconds
    for table in Base.metadata.sorted_tables:
        there = {column["name"] for column in columns.get((None, table.name), ())}
        if missing := {column.name for column in table.columns} - there:
            raise _NotOursError(f"its table {table.name} lacks {', '.join(sorted(missing))}")
    return True
