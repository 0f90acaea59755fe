"""Jobs and finished units of a store, made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from service.evaluation.perplexity.request import PerplexityRequest
from service.jobs.records import JobInfo
from service.jobs.storage.outcomes import pack
from service.jobs.storage.owner import Owner
from service.jobs.storage.queue import Finished, JobQueue
from service.jobs.storage.store import JobStore
from tests.service.jobs.conftest import body

DATA = pack({"nll": np.arange(3.0)})


def add(
    store: JobStore, tenant: str = "anna", models: tuple[str, ...] = ("tiny",), key: str | None = None, **fields: Any
) -> JobInfo:
    request = PerplexityRequest.model_validate(body(**fields))
    return store.add(tenant, request, models=list(models), units=6, tokens=384, idempotency_key=key)


def queue_of(store: JobStore, *served: str, owner: Owner | None = None, only_own: bool = False) -> JobQueue:
    return JobQueue(store.database, owner or store.owner, served or ("tiny",), only_own=only_own)


def unit(position: int, *, key: str | None = None, data: bytes | None = DATA) -> Finished:
    key = key or f"{position:064}"
    summary = {"nll_mean": 0.1 + position}
    return Finished(position, key, "yarn(factor=4)", "input[0]", 64, 60, summary, 0.5 if data else 0.0, data)


def claimed(store: JobStore, queue: JobQueue, **fields: Any) -> tuple[JobInfo, int]:
    """A job that ``queue`` works on, and its number."""
    job = add(store, **fields)
    (number,) = queue.waiting("tiny", ()).values()
    assert queue.claim(number) is not None
    return job, number
