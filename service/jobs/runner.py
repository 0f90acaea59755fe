"""Works on jobs: one unit at a time per served model, between generation steps, from the tenants in turn.

Whatever ends the process, finished units are on disk and the rest is done by whoever claims the job next.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

import structlog
from sqlalchemy.exc import SQLAlchemyError

from patches import SlotsExhausted
from service import context
from service.engine.failures import EngineFailed, EngineStopping
from service.engine.out_of_memory import OutOfMemory
from service.errors import ApiError
from service.evaluation.unit import Outcome
from service.jobs.active import ActiveJob
from service.jobs.planning import planned, request_of
from service.jobs.signals import Signal, within
from service.jobs.storage.calls import StoreCalls
from service.jobs.storage.database import StoreOutOfReach
from service.jobs.storage.queue import Claimed, Finished, JobQueue, LeaseLost
from service.jobs.storage.results import Packed, pack
from service.jobs.storage.store import JobStore
from service.models.registry import ModelRegistry, ServedModel
from service.settings import Settings
from service.sharing.admission import QueueFull
from service.sharing.workers import Workers

BEAT_S = 5.0
"""Between two signs of life, and how soon work that other processes leave behind is seen."""

PRUNE_S = 60.0
"""Between two looks for outcomes and jobs that have had their time."""

RETRY_S = 0.5
"""Until a full queue, a restarting engine or a database out of reach is tried again."""

RUNNER = "jobs"
"""The tenant that plans and results of jobs count for among the workers."""

CLOSE_S = 2.0
"""How long the end of the server waits for the database."""

AT_ONCE = 256
"""Units whose stored outcomes are taken in one transaction."""

MOST_RETRIES = 3
"""Of one unit whose engine failed or ran out of memory; then its job fails."""

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")

log = structlog.get_logger()


class JobRunner:
    """Runs the jobs of ``store`` on ``models``. Start, use and close it on one event loop."""

    def __init__(
        self,
        store: JobStore,
        models: ModelRegistry,
        settings: Settings,
        workers: Workers,
        calls: StoreCalls,
        as_api_error: Callable[[Exception], ApiError],
    ) -> None:
        served = {model.name for model in models}
        self._store, self._models, self._settings = store, models, settings
        self._workers, self._store_threads, self._as_api_error = workers, calls, as_api_error
        self._queue = JobQueue(store.database, store.owner, served, only_own=not settings.resume_jobs)
        self._active: dict[int, ActiveJob] = {}
        self._held: set[int] = set()
        """Jobs whose lease is renewed: the active ones, and one being planned."""
        self._turns: dict[tuple[str, str], int] = {}
        self._count = itertools.count(1)
        self._choosing = asyncio.Lock()
        self._added, self._changed = Signal(), Signal()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._calls: set[asyncio.Future[Any]] = set()

    def start(self) -> None:
        """Begin to work, from the event loop."""
        self._loop = asyncio.get_running_loop()
        self._tasks = [asyncio.create_task(self._work(served)) for served in self._models]
        self._tasks.append(asyncio.create_task(self._beat()))

    async def close(self) -> None:
        """Stop. Units at work are given up; their jobs wait for whoever opens the database next."""
        self._loop = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._calls:
            await asyncio.wait(self._calls, timeout=CLOSE_S)
        self._active.clear()
        self._store.in_flight.clear()
        try:
            await self._store_threads.within(CLOSE_S, self._queue.release)
        except StoreOutOfReach as error:
            log.warning("jobs_not_released", error=str(error))  # their leases run out

    def notify(self) -> None:
        """A job was added or cancelled. From any thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has closed meanwhile
                self._loop.call_soon_threadsafe(self._added.fire)

    def progress(self, job_id: str) -> int:
        """Tokens done of the job's units that are at work here."""
        return self._store.in_flight.get(job_id, 0)

    def next_change(self) -> asyncio.Event:
        """Set when any job gets further. Take it before looking how far they are: nothing is missed."""
        return self._changed.next()

    async def _work(self, served: ServedModel) -> None:
        """Units of one model, one after another, until the engine stops."""
        while True:
            added = self._added.next()
            try:
                chosen = await self._choose(served.name)
                if chosen is None:
                    await within(added, BEAT_S)
                else:
                    job, position = chosen
                    await self._run(job, position, served)
            except EngineStopping:
                return
            except Exception as error:
                log.error("job_runner_failed", exc_info=error)
                for job in list(self._active.values()):
                    self._drop(job)  # claimed again, from what is on disk
                await asyncio.sleep(BEAT_S)

    async def _beat(self) -> None:
        """Renew leases, give up what was cancelled or taken, and now and then look for what is old."""
        pruned = -PRUNE_S
        while True:
            added = self._added.next()
            held = frozenset(self._held)
            try:
                still = await self._store_call(self._queue.beat, held) if held else set()
                if time.monotonic() - pruned >= PRUNE_S:
                    pruned = time.monotonic()
                    await self._prune()
            except SQLAlchemyError as error:
                log.error("store_not_kept", error=str(error))
                still = set(held)
            for number in (held - still) & self._active.keys():
                log.info("job_given_up", job=self._active[number].id)
                self._drop(self._active[number])
            await within(added, BEAT_S)

    async def _choose(self, model: str) -> tuple[ActiveJob, int] | None:
        """The next unit for ``model``: of the tenant that has waited longest, of its oldest job."""
        async with self._choosing:
            while True:
                waiting = await self._store_call(self._queue.waiting, model, frozenset(self._held))
                working: dict[str, ActiveJob] = {}
                for job in sorted(self._active.values(), key=lambda job: job.number):
                    if job.pending.get(model):
                        working.setdefault(job.tenant, job)
                oldest = {tenant: job.number for tenant, job in working.items()}
                for tenant, number in waiting.items():
                    oldest[tenant] = min(number, oldest.get(tenant, number))
                if not oldest:
                    return None
                tenant = min(oldest, key=lambda tenant: (self._turns.get((model, tenant), 0), oldest[tenant]))
                found = self._active.get(oldest[tenant]) or await self._activate(oldest[tenant])
                if found is not None and found.pending.get(model):
                    self._turns[model, tenant] = next(self._count)
                    return found, found.pending[model].popleft()

    async def _activate(self, number: int) -> ActiveJob | None:
        """Claim and plan a job, and take what the store has of it; None when nothing of it is left to do here."""
        claimed = await self._store_call(self._queue.claim, number)
        if claimed is None:
            return None
        self._held.add(number)
        try:
            job = await self._beside(self._planned, claimed)
            finished = await self._store_call(self._queue.begin, number, job.keys, job.plan.tokens)
            job.leave(set(range(len(job.keys))) - finished)
            self._active[number] = job
            log.info("job_started", job=job.id, units=len(job.keys), finished=len(finished))
            await self._take(job, sorted(job.left))
        except LeaseLost:
            self._forget(number)
            return None
        except SQLAlchemyError:
            self._forget(number)
            raise
        except Exception as error:
            await self._fail(number, claimed.id, error)
            return None
        return job

    def _planned(self, claimed: Claimed) -> ActiveJob:
        request = request_of(claimed.request)
        plan, keys = planned(request, claimed.tenant, claimed.id, self._models, self._settings)
        return ActiveJob(claimed, plan, keys)

    async def _take(self, job: ActiveJob, positions: list[int]) -> bool:
        """Take the outcomes of ``positions`` that the store has; whether it had any."""

        def stored(some: list[int]) -> list[Finished]:
            found = ((position, self._queue.outcome(job.keys[position])) for position in some)
            return [job.finished(position, outcome) for position, outcome in found if outcome is not None]

        any_taken = False
        for start in range(0, len(positions), AT_ONCE):
            if units := await self._store_call(stored, positions[start : start + AT_ONCE]):
                any_taken = True
                job.take({unit.position for unit in units})
                await self._finished(job, units)
        if not positions:
            await self._finished(job, [])
        return any_taken

    async def _run(self, job: ActiveJob, position: int, served: ServedModel) -> None:
        """One unit to its end: recorded, put back, or the end of its job."""
        try:
            if not await self._take(job, [position]):
                await self._finished(job, [await self._measured(job, position, served)])
        except asyncio.CancelledError:
            if not job.dropped or self._loop is None:  # a dropped job's unit ends, a closed runner's worker does too
                raise
        except LeaseLost:
            self._drop(job)
        except (QueueFull, SlotsExhausted):
            job.leave({position})
            await asyncio.sleep(RETRY_S)
        except (EngineStopping, SQLAlchemyError):
            raise
        except (OutOfMemory, EngineFailed) as error:
            job.failures[position] += 1
            log.warning("unit_failed", job=job.id, error=str(error), failures=job.failures[position])
            if job.failures[position] > MOST_RETRIES:
                await self._fail(job.number, job.id, error)
            else:
                job.leave({position})
                await asyncio.sleep(RETRY_S)
        except Exception as error:
            await self._fail(job.number, job.id, error)
        finally:
            job.in_flight.pop(position, None)
            self._note_in_flight(job)

    async def _measured(self, job: ActiveJob, position: int, served: ServedModel) -> Finished:
        """The unit's outcome from the model's engine.

        Raises:
            asyncio.CancelledError: when the job was dropped meanwhile; and whatever the engine or the unit raises.
        """
        unit, began = job.plan.units[position], time.perf_counter()

        def report(tokens: int) -> None:
            if not task.done():
                job.in_flight[position] += tokens
                self._note_in_flight(job)
                self._changed.fire()

        with context.acting_for(job.tenant):
            scored = {unit.subject.method.method: unit.tokens}
            scoring = served.engine.score(unit.run(), unit.length, report, scored=scored)
            task: asyncio.Task[Outcome] = asyncio.create_task(scoring)
        job.running.add(task)
        try:
            outcome = await task
        finally:
            job.running.discard(task)
        seconds = time.perf_counter() - began
        return await self._beside(job.finished, position, outcome, seconds)

    def _note_in_flight(self, job: ActiveJob) -> None:
        tokens = 0 if job.dropped else sum(job.in_flight.values())
        if tokens:
            self._store.in_flight[job.id] = tokens
        else:
            self._store.in_flight.pop(job.id, None)

    async def _finished(self, job: ActiveJob, units: list[Finished]) -> None:
        """Put finished units on disk; after the last one, the result."""
        if units and not await self._store_call(self._queue.record, job.number, units):
            raise LeaseLost
        job.left -= {unit.position for unit in units}
        self._changed.fire()
        if not job.left:
            await self._complete(job)

    async def _complete(self, job: ActiveJob) -> None:
        """Outcomes become the result; those that are lost or damaged are measured again first."""
        outcomes = await self._store_call(self._queue.outcomes, job.number)
        positions = range(len(job.keys))
        if lost := set(positions) - outcomes.keys():
            job.leave(lost)
            self._added.fire()
            return

        def result() -> Packed:
            result = job.plan.result([outcomes[position] for position in positions])
            result.id, result.seconds = job.id, None
            return pack(result)

        if not await self._store_call(self._queue.finish, job.number, await self._beside(result)):
            raise LeaseLost
        self._forget(job.number)
        log.info("job_done", job=job.id)

    async def _prune(self) -> None:
        limits = self._settings.outcomes_max_bytes, self._settings.jobs_kept_days
        removed, jobs = await self._store_call(self._queue.prune, *limits)
        if removed or jobs:
            log.info("store_pruned", outcomes=removed, jobs=jobs)

    async def _fail(self, number: int, job_id: str, error: Exception) -> None:
        """End a job with ``error``, in the words and with the code that a route would answer."""
        told = self._as_api_error(error)
        unexpected = error if told.status == 500 else None
        log.warning("job_failed", job=job_id, code=told.code, error=told.message, exc_info=unexpected)
        if job := self._active.get(number):
            self._drop(job)
        # PostgreSQL takes no NUL, and the message may quote what was sent.
        await self._store_call(self._queue.fail, number, told.code or "error", told.message.replace("\0", ""))
        self._forget(number)

    def _drop(self, job: ActiveJob) -> None:
        job.drop()
        self._note_in_flight(job)
        self._forget(job.number)

    def _forget(self, number: int) -> None:
        self._active.pop(number, None)
        self._held.discard(number)
        self._changed.fire()

    async def _beside(
        self, function: Callable[Parameters, Returned], *args: Parameters.args, **options: Parameters.kwargs
    ) -> Returned:
        """Call ``function`` on a thread beside the model. Jobs have their own place there: no tenant fills it."""
        with context.acting_for(RUNNER):
            return await self._workers.run(function, *args, **options)

    async def _store_call(
        self, function: Callable[Parameters, Returned], *args: Parameters.args, **options: Parameters.kwargs
    ) -> Returned:
        """Call the store on a thread. A call that has begun is never abandoned; a database out of reach is waited
        for."""
        while True:
            call = self._store_threads.begun(function, *args, **options)
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
            try:
                return await asyncio.shield(call)
            except StoreOutOfReach as error:
                log.warning("jobs_out_of_reach", error=str(error))
                await asyncio.sleep(RETRY_S)
