"""A process that works on jobs until it is killed: a fork of one that has imported everything."""

from __future__ import annotations

import asyncio
from pathlib import Path

from service.api.errors import as_api_error
from service.jobs.database.calls import StoreCalls
from service.jobs.database.opening import Database
from service.jobs.runner import JobRunner
from service.jobs.storage import abandoned
from service.jobs.storage.store import JobStore
from service.models.registry import ModelRegistry
from service.settings import Settings
from service.sharing.workers import Workers


def open_database(url: str) -> None:
    Database(url).close()


def serve(url: str, settings: Settings, ready: Path) -> None:
    """Never returns. ``ready`` is made when work begins."""

    abandoned.MOST_CLAIMS = 1000  # killed at random moments, a job may well be begun often before a unit is finished

    async def work() -> None:
        workers = Workers(shared=False)
        JobRunner(JobStore(url), ModelRegistry(settings), settings, workers, StoreCalls(), as_api_error).start()
        ready.touch()
        await asyncio.Event().wait()

    asyncio.run(work())
