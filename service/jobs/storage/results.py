"""Results as bytes, and the table that keeps them.

It keeps a job's results as long as the job. Of others it keeps the most recent of a tenant.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import structlog
from sqlalchemy import ColumnElement, and_, exists, func, select
from sqlalchemy.orm import Session

from service.evaluation.results import EvaluationResult
from service.jobs.database.statements import delete_listed
from service.jobs.database.tables import StoredResult
from service.jobs.storage.refusals import ResultDamaged

PIECE = 256 << 10

TICK = timedelta(microseconds=1)

log = structlog.get_logger()


class Packed(NamedTuple):
    """A result's JSON, packed with gzip: as it is stored, and as browsers take it."""

    evaluation: str
    data: bytes


def written_and_packed(result: EvaluationResult) -> tuple[str, Packed]:
    """The result as JSON, plain and packed."""
    written = result.model_dump_json()
    return written, Packed(result.evaluation, gzip.compress(written.encode(), 6, mtime=0))


def pack(result: EvaluationResult) -> Packed:
    return written_and_packed(result)[1]


def unpacked(data: bytes) -> Iterator[bytes]:
    """The contents of ``data``, which gzip packed, in pieces.

    Raises:
        zlib.error: for bytes that do not fit their checksum.
    """
    unpacking = zlib.decompressobj(wbits=31)
    for begin in range(0, len(data), PIECE):  # what is left of a piece is copied each time, so pieces are small
        rest: bytes | memoryview = memoryview(data)[begin : begin + PIECE]
        while rest:
            yield unpacking.decompress(rest, PIECE)
            rest = unpacking.unconsumed_tail
    yield unpacking.flush()
    if not unpacking.eof:
        raise zlib.error("the end is missing")


def put(session: Session, result_id: str, tenant: str, packed: Packed, job: int | None = None) -> None:
    """Keep a result for ``tenant``. One of no job is the tenant's newest, whatever the clocks of servers say."""
    created_at, (evaluation, data) = datetime.now(UTC), packed
    if job is None:
        others = select(func.max(StoredResult.created_at)).where(_of_no_job(tenant))
        if newest := session.scalar(others):
            created_at = max(created_at, newest + TICK)
    row = {"id": result_id, "tenant": tenant, "evaluation": evaluation, "job": job, "created_at": created_at}
    session.add(StoredResult(**row, size=len(data), data=data))


def get(session: Session, tenant: str, result_id: str) -> Packed | None:
    """The tenant's result, or None where there is none.

    Raises:
        ResultDamaged: for a damaged one, which is logged.
    """
    query = select(StoredResult.evaluation, StoredResult.data, StoredResult.job)
    found = session.execute(query.where(StoredResult.id == result_id, StoredResult.tenant == tenant)).one_or_none()
    if found is None:
        return None
    evaluation, data, job = found
    try:
        for _ in unpacked(data):
            pass
    except zlib.error as error:
        log.warning("result_damaged", result=result_id, error=str(error))
        raise ResultDamaged(result_id, of_job=job is not None) from error
    return Packed(evaluation, data)


def is_whole(session: Session, tenant: str, result_id: str) -> bool:
    """True if ``get`` gives the result."""
    try:
        return get(session, tenant, result_id) is not None
    except ResultDamaged:
        return False


def is_kept(session: Session, job: int) -> bool:
    """True if the job has a result."""
    return bool(session.scalar(select(exists().where(StoredResult.job == job))))


def prune(session: Session, tenant: str, most: int, most_bytes: int) -> None:
    """Remove the tenant's oldest results of no job beyond ``most`` of them, or beyond ``most_bytes``; the newest
    stays whatever its size."""
    query = select(StoredResult.id, StoredResult.size).where(_of_no_job(tenant))
    kept = 0
    leaving = []
    for index, (result_id, size) in enumerate(session.execute(query.order_by(StoredResult.created_at.desc()))):
        kept += size
        if index >= most or (index and kept > most_bytes):
            leaving.append(result_id)
    delete_listed(session, StoredResult.id, leaving)


def _of_no_job(tenant: str) -> ColumnElement[bool]:
    return and_(StoredResult.tenant == tenant, StoredResult.job.is_(None))
