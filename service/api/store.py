"""The database of jobs and results, as routes reach it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from fastapi import Request

from service.jobs.database.calls import StoreCalls
from service.jobs.storage.store import JobStore

STORE_S = 10.0
"""Seconds that an answer waits for the database."""

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


def store_of(request: Request) -> JobStore:
    store: JobStore = request.app.state.jobs
    return store


async def stored(
    request: Request, function: Callable[Parameters, Returned], *args: Parameters.args, **options: Parameters.kwargs
) -> Returned:
    """Call the store on one of the database's threads.

    Raises:
        StoreOutOfReach: when the database does not answer; and whatever the store raises.
    """
    calls: StoreCalls = request.app.state.store_calls
    return await calls.within(STORE_S, function, *args, **options)
