"""Statements that several tables share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from sqlalchemy import ColumnElement, CursorResult, Insert, delete
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import InstrumentedAttribute, Session

from service.jobs.database.tables import Base

VALUES = 500
"""Values in one statement; databases take some thousands at most."""


def is_postgresql(session: Session) -> bool:
    """True on PostgreSQL, false on SQLite."""
    return session.get_bind().dialect.name == "postgresql"


def inserted(session: Session, table: type[Base], values: dict[str, Any], *, replaces: bool) -> Insert:
    """The statement that adds a row. A row with its key stays as it is, unless it ``replaces`` that."""
    insert = postgresql.insert if is_postgresql(session) else sqlite.insert
    statement = insert(table).values(values)
    keys = list(table.__mapper__.primary_key)
    if replaces:
        return statement.on_conflict_do_update(index_elements=keys, set_=values)
    return statement.on_conflict_do_nothing(index_elements=keys)


def delete_listed(
    session: Session, column: InstrumentedAttribute[Any], listed: Sequence[Any], *where: ColumnElement[bool]
) -> None:
    """Remove the rows with one of the values ``listed`` in ``column``, some of them at a time."""
    for start in range(0, len(listed), VALUES):
        some = column.in_(listed[start : start + VALUES])
        session.execute(delete(column.class_).where(some, *where))


def changed(result: object) -> int:
    """Number of rows that an UPDATE or DELETE changed."""
    return cast("CursorResult[object]", result).rowcount
