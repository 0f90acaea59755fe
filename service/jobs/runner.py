"""Runs jobs: one unit at a time per served model, interleaved with generation, tenants in turn.

Finished units are on disk whatever ends the process. Other processes of the same database claim the rest.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Collection
from contextlib import suppress

import structlog
from sqlalchemy.exc import SQLAlchemyError

from service.engine.failures import EngineStopping
from service.errors import ApiError
from service.jobs.active import ActiveJob, ActiveJobs
from service.jobs.address import versions_of
from service.jobs.database.calls import PatientCalls, StoreCalls
from service.jobs.database.opening import StoreOutOfReach
from service.jobs.execution import Execution
from service.jobs.signals import within
from service.jobs.storage.pruning import Pruning
from service.jobs.storage.queue import JobQueue
from service.jobs.storage.store import JobStore
from service.jobs.storage.units import ClaimedUnit
from service.models.registry import ModelRegistry, ServedModel
from service.settings import Settings
from service.sharing.workers import Workers

BEAT_S = 5.0
"""Seconds between two renewals of leases, a third of short ones; a failed runner begins again as soon."""

POLL_S = 0.5
"""Seconds between two looks for work that other processes added or left behind."""

LOOK_S = 0.1
"""Seconds between two looks for other jobs while claimed units are at work."""

PRUNE_S = 60.0
"""Pruning interval, in seconds."""

CLOSE_S = 2.0
"""Seconds that the end of the server waits for the database."""

log = structlog.get_logger()


class JobRunner:
    """Runs the jobs of ``store`` on ``models``. Start, use and close it on one event loop.

    ``as_api_error`` gives the code and the message of a job that fails. ``tenants`` gives those whose jobs run now,
    None for all. Nobody can see or cancel the jobs of others, whose API keys are gone. They wait.
    """

    def __init__(  # noqa: PLR0913 - the parts of the application that it works with
        self,
        store: JobStore,
        models: ModelRegistry,
        settings: Settings,
        workers: Workers,
        calls: StoreCalls,
        as_api_error: Callable[[Exception], ApiError],
        tenants: Callable[[], Collection[str] | None] = lambda: None,
    ) -> None:
        self._models, self._settings, self._calls, self._tenants = models, settings, calls, tenants
        only_own, lease_s = not settings.resume_jobs, settings.lease_s
        self._queue = JobQueue(store.database, store.owner, versions_of(models), only_own=only_own, lease_s=lease_s)
        self._pruning = Pruning(store.database)
        self._beat_s = min(BEAT_S, lease_s / 3)
        self._jobs, self._store_call = ActiveJobs(store.in_flight), PatientCalls(calls)
        self._execution = Execution(self._queue, self._jobs, models, settings, workers, self._store_call, as_api_error)
        self._without_key: set[str] = set()
        self._looked: dict[str, tuple[float, dict[str, int]]] = {}
        self._turns: dict[tuple[str, str], int] = {}
        self._count = itertools.count(1)
        self._choosing = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to work, from the event loop."""
        self._loop = asyncio.get_running_loop()
        self._tasks = [asyncio.create_task(self._work(served)) for served in self._models]
        self._tasks.append(asyncio.create_task(self._beat()))

    async def close(self) -> None:
        """Stop. Claimed units are given up; their jobs wait for the next process that opens the database."""
        self._loop, self._jobs.closed = None, True
        leased = frozenset(self._jobs.leased)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._store_call.settle(CLOSE_S)
        self._jobs.active.clear()
        self._jobs.in_flight.clear()
        try:
            await self._calls.within(CLOSE_S, self._queue.release, leased)
        except StoreOutOfReach as error:
            log.warning("jobs_not_released", error=str(error))  # their leases run out

    def notify(self) -> None:
        """A job was added or cancelled. From any thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has closed meanwhile
                self._loop.call_soon_threadsafe(self._jobs.added.fire)

    def out_of_reach(self) -> bool:
        """True while the database does not answer, and jobs wait."""
        return self._store_call.out_of_reach

    def progress(self, job_id: str) -> int:
        """Tokens done of the job's units that are at work here."""
        return sum(unit.tokens for unit in self._jobs.in_flight.get(job_id, {}).values())

    def next_change(self) -> asyncio.Event:
        """Set when any job gets further. Take it before looking how far they are: nothing is missed."""
        return self._jobs.changed.next()

    async def _work(self, served: ServedModel) -> None:
        """Units of one model, one after another, until the engine stops."""
        while True:
            added = self._jobs.added.next()
            try:
                chosen = await self._choose(served.name)
                if chosen is None:
                    await within(added, POLL_S)
                else:
                    await self._execution.run(*chosen, served)
            except EngineStopping:
                return
            except Exception as error:
                log.error("job_runner_failed", exc_info=error)
                for job in list(self._jobs.active.values()):
                    self._jobs.drop(job)  # claimed again, from what is on disk
                await asyncio.sleep(BEAT_S)

    async def _beat(self) -> None:
        """Renew leases, write progress, leave jobs that have ended, and now and then look for what is old."""
        pruned = -PRUNE_S
        while True:
            added = self._jobs.added.next()
            leased = frozenset(self._jobs.leased)
            try:
                still = await self._store_call(self._queue.beat, leased, self._jobs.progress()) if leased else set()
                await self._store_call(self._queue.hold)
                if time.monotonic() - pruned >= PRUNE_S:
                    pruned = time.monotonic()
                    await self._prune()
            except SQLAlchemyError as error:
                log.error("store_not_kept", error=str(error))
                still = set(leased)
            for number in (leased - still) & self._jobs.active.keys():
                log.info("job_given_up", job=self._jobs.active[number].id)
                self._jobs.drop(self._jobs.active[number])
            await within(added, self._beat_s)

    async def _choose(self, model: str) -> tuple[ActiveJob, ClaimedUnit] | None:
        """The next unit for ``model``: of the tenant that has waited longest, of its oldest job."""
        async with self._choosing:
            tried: set[int] = set()
            while True:
                await self._set_aside()
                claimed = [job for job in self._jobs.active.values() if job.claimed[model]]
                oldest = await self._waiting(model, tried, at_work=bool(claimed))
                for job in claimed:
                    oldest[job.tenant] = min(job.number, oldest.get(job.tenant, job.number))
                oldest = self._with_keys(oldest)
                if not oldest:
                    return None
                tenant = min(oldest, key=lambda tenant: (self._turns.get((model, tenant), 0), oldest[tenant]))
                number = oldest[tenant]
                found = self._jobs.active.get(number)
                if found is None or not found.claimed[model]:
                    found = await self._execution.take(number, model)
                if found is None:
                    tried.add(number)
                elif found.claimed[model] and self._with_keys({tenant: number}):  # planning takes a while
                    self._turns[model, tenant] = next(self._count)
                    return found, found.claimed[model].popleft()

    async def _waiting(self, model: str, tried: set[int], *, at_work: bool) -> dict[str, int]:
        """Tenant -> its oldest job for ``model`` in the database, except ``tried``. With claimed units ``at_work``, the
        last answer serves for ``LOOK_S`` seconds: small units would spend most of their time on the question."""
        looked, answer = self._looked.get(model, (0.0, {}))
        if not at_work or tried or time.monotonic() - looked > LOOK_S:
            leased = frozenset(self._jobs.leased)
            answer = await self._store_call(self._queue.waiting, model, leased, frozenset(tried))
            self._looked[model] = time.monotonic(), answer
        return dict(answer)

    def _with_keys(self, oldest: dict[str, int]) -> dict[str, int]:
        """``oldest`` without the tenants whose jobs wait for their API keys. The log names each once."""
        tenants = self._tenants()
        if tenants is None:
            return oldest
        gone = oldest.keys() - tenants
        for tenant in sorted(gone - self._without_key):
            log.warning("jobs_wait_for_their_key", tenant=tenant)
        self._without_key = (self._without_key | gone).difference(tenants)
        return {tenant: number for tenant, number in oldest.items() if tenant not in gone}

    async def _set_aside(self) -> None:
        """Give back what was claimed for tenants whose API keys are gone, after the units at work."""
        tenants = self._tenants()
        for job in list(self._jobs.active.values()):
            if tenants is not None and job.tenant not in tenants and not job.in_flight:
                await self._store_call(self._queue.give_back, job.number)
                log.info("job_set_aside", job=job.id)
                self._jobs.drop(job)

    async def _prune(self) -> None:
        limits = self._settings.outcomes_max_bytes, self._settings.jobs_kept_days
        removed, jobs = await self._store_call(self._pruning.prune, *limits)
        if removed or jobs:
            log.info("store_pruned", outcomes=removed, jobs=jobs)
