"""Jobs and finished units of a store, made by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from service.evaluation.perplexity.request import PerplexityRequest
from service.jobs.address import setup_digest
from service.jobs.records import JobInfo
from service.jobs.storage.outcomes import pack
from service.jobs.storage.owner import Owner
from service.jobs.storage.queue import JobQueue
from service.jobs.storage.store import JobStore
from service.jobs.storage.terms import Terms
from service.jobs.storage.units import Finished
from tests.service.jobs.bench import body

LEASE_S = 30.0
PLAN = "a plan"
DATA = pack({"nll": np.arange(3.0)})


def add(
    store: JobStore, tenant: str = "anna", models: tuple[str, ...] = ("tiny",), key: str | None = None, **fields: Any
) -> JobInfo:
    """A job; ``weights`` are those of the server that takes its request, on these ``terms``."""
    weights, terms = fields.pop("weights", None), fields.pop("terms", None)
    terms = terms or Terms(weights and setup_digest(models, dict.fromkeys(models, weights)), key)
    request = PerplexityRequest.model_validate(body(**fields))
    return store.add(tenant, request, models=list(models), units=6, tokens=384, terms=terms)


def queue_of(
    store: JobStore,
    *served: str,
    owner: Owner | None = None,
    only_own: bool = False,
    lease_s: float = LEASE_S,
    weights: str = "ours",
) -> JobQueue:
    models = dict.fromkeys(served or ("tiny",), weights)
    return JobQueue(store.database, owner or store.owner, models, only_own=only_own, lease_s=lease_s)


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


def planned(store: JobStore, queue: JobQueue, units: int = 6, **fields: Any) -> tuple[JobInfo, int]:
    """A job whose units, ``unit(0)`` and so on, every queue may claim."""
    job, number = claimed(store, queue, **fields)
    enter(queue, number, range(units))
    return job, number


def enter(queue: JobQueue, number: int, positions: Iterable[int]) -> None:
    """Plan the units at ``positions``."""
    queue.enter(number, PLAN, [(position, unit(position).key, "tiny") for position in positions])


def taken(queue: JobQueue, number: int, most: int = 6) -> list[int]:
    """Positions of units that ``queue`` claims."""
    found = queue.take(number, "tiny", most)
    return [] if found is None else [unit.position for unit in found.units]
