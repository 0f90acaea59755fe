"""Outcomes as bytes, and their table: damaged ones are never served, old ones may be pruned."""

from __future__ import annotations

import hashlib
import io
import zipfile
from datetime import UTC, datetime

import numpy as np
import structlog
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from service.evaluation.unit import Outcome
from service.jobs.database.opening import Database
from service.jobs.database.statements import delete_listed, inserted
from service.jobs.database.tables import FinishedUnit, Job, StoredOutcome
from service.jobs.records import UNFINISHED

log = structlog.get_logger()


def pack(outcome: Outcome) -> bytes:
    """Raises:
    TypeError: for arrays of Python objects, which cannot be loaded again.
    """
    if objects := [name for name, array in outcome.items() if np.asarray(array).dtype.hasobject]:
        raise TypeError(f"arrays of Python objects: {', '.join(objects)}")
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **outcome)  # type: ignore[arg-type]
    return buffer.getvalue()


def unpack(data: bytes) -> Outcome:
    """Raises:
    ValueError, zipfile.BadZipFile: when these are no bytes of ``pack``.
    """
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def _checksum(key: str, data: bytes) -> str:
    return hashlib.sha256(key.encode() + data).hexdigest()


def put(session: Session, key: str, data: bytes) -> None:
    """Keep ``data``, in place of what there may be."""
    values = {"key": key, "checksum": _checksum(key, data), "size": len(data), "used_at": datetime.now(UTC)}
    values["data"] = data
    session.execute(inserted(session, StoredOutcome, values, replaces=True))


def read(database: Database, key: str) -> Outcome | None:
    """``get`` in a transaction for it alone."""
    with database.reading() as session:
        return get(session, key)


def get(session: Session, key: str) -> Outcome | None:
    """The outcome, or None where there is none or only a damaged one, which is logged."""
    found = session.execute(
        select(StoredOutcome.checksum, StoredOutcome.data).where(StoredOutcome.key == key)
    ).one_or_none()
    if found is None:
        return None
    checksum, data = found
    try:
        if _checksum(key, data) == checksum:
            return unpack(data)
    except (ValueError, OSError, zipfile.BadZipFile) as error:  # written by another version
        log.warning("outcome_unreadable", key=key, error=str(error))
        return None
    log.warning("outcome_damaged", key=key)
    return None


def touch(session: Session, keys: list[str]) -> None:
    """These were used now."""
    session.execute(update(StoredOutcome).where(StoredOutcome.key.in_(keys)).values(used_at=datetime.now(UTC)))


def prune(session: Session, most_bytes: int) -> int:
    """Remove the least recently used outcomes above ``most_bytes`` that no unfinished job needs; returns how many."""
    excess = (session.scalar(select(func.sum(StoredOutcome.size))) or 0) - most_bytes
    if excess <= 0:
        return 0
    needed = select(FinishedUnit.key).join(Job).where(Job.state.in_(UNFINISHED))
    oldest = (
        select(StoredOutcome.key, StoredOutcome.size)
        .where(StoredOutcome.key.not_in(needed))
        .order_by(StoredOutcome.used_at)
    )
    leaving = []
    for key, size in session.execute(oldest):
        if excess <= 0:
            break
        leaving.append(key)
        excess -= size
    delete_listed(session, StoredOutcome.key, leaving)
    return len(leaving)
