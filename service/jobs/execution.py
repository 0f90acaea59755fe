"""Units of jobs at work: measured by the engine, recorded in the database, and their result at the end."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

import structlog
from sqlalchemy.exc import SQLAlchemyError

from patches import SlotsExhausted
from service import context
from service.engine.failures import EngineFailed, EngineStopping
from service.engine.thread.out_of_memory import OutOfMemory
from service.errors import ApiError
from service.evaluation.scoring.pass_memory import held_tokens
from service.evaluation.unit import Outcome
from service.jobs.active import ActiveJob, ActiveJobs
from service.jobs.database.calls import RETRY_S, PatientCalls
from service.jobs.planning import planned, request_of, result_of
from service.jobs.records import AtWork
from service.jobs.storage.claims import Claimed, LeaseLost, Recorded, Taken
from service.jobs.storage.queue import JobQueue
from service.jobs.storage.results import Packed, pack
from service.jobs.storage.units import ClaimedUnit, Finished
from service.models.registry import ModelRegistry, ServedModel
from service.settings import Settings
from service.sharing.admission import QueueFull
from service.sharing.workers import Workers

RUNNER = "jobs"
"""The tenant under which workers count the plans and results of jobs."""

AT_ONCE = 256
"""Units whose stored outcomes are taken in one transaction."""

MOST_RETRIES = 3
"""Of one unit whose engine failed or ran out of memory; then its job fails."""

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")

log = structlog.get_logger()


class Execution:
    """Plans jobs of ``queue``, claims their units and runs them on ``models``. ``as_api_error`` words the failure of
    a job as a route would answer it."""

    def __init__(  # noqa: PLR0913 - the parts of the application that it works with
        self,
        queue: JobQueue,
        jobs: ActiveJobs,
        models: ModelRegistry,
        settings: Settings,
        workers: Workers,
        store_call: PatientCalls,
        as_api_error: Callable[[Exception], ApiError],
    ) -> None:
        self._queue, self._jobs, self._models, self._settings = queue, jobs, models, settings
        self._workers, self._store_call, self._as_api_error = workers, store_call, as_api_error

    async def take(self, number: int, model: str) -> ActiveJob | None:
        """Claim units of a job for ``model``, or plan it if it has no plan; None where there is nothing to do now."""
        job = self._jobs.active.get(number)
        most, tries = 1 if job is None else job.batch(model), itertools.count()

        def take() -> Taken | None:
            return self._queue.take(number, model, most, again=next(tries) > 0)

        self._jobs.leased.add(number)
        try:
            taken = await self._store_call(take)
            if taken is None:
                return None if job is not None else await self._plan(number)
            if job is None or job.dropped or job.digest != taken.plan:
                job = await self._join(number, taken.plan)
            if job is not None:
                job.claimed[model].extend(taken.units)
            return job
        finally:
            if number not in self._jobs.active:
                self._jobs.leased.discard(number)

    async def _plan(self, number: int) -> ActiveJob | None:
        """Own a job and plan it for all processes; None when nothing of it is left to do."""
        claimed = await self._store_call(self._queue.claim, number)
        if claimed is None:
            return None
        try:
            job = await self._planned(claimed)
            finished = await self._store_call(self._queue.begin, number, job.keys, job.plan.cost)
            self._jobs.active[number] = job
            log.info("job_started", job=job.id, units=len(job.keys), finished=len(finished))
            await self._go_on(job, set(range(len(job.keys))) - finished)
        except LeaseLost:
            self._jobs.forget(number)
        except SQLAlchemyError:
            self._jobs.forget(number)
            raise
        except Exception as error:
            if claimed.others_may and number not in self._jobs.active:
                await self._leave_to_acceptor(claimed, error)
            else:
                await self._fail(number, claimed.id, error)
        return self._jobs.active.get(number)

    async def _leave_to_acceptor(self, claimed: Claimed, error: Exception) -> None:
        """Leave a job that cannot be planned here to the server that accepted it, or to one like that."""
        log.info("job_left_to_others", job=claimed.id, why=str(error))
        with suppress(LeaseLost):
            await self._store_call(self._queue.refuse, claimed.number)
        self._jobs.forget(claimed.number)

    async def _join(self, number: int, plan: str) -> ActiveJob | None:
        """Plan a job that others work on; None where this process makes another plan of it."""
        if stale := self._jobs.active.get(number):
            self._jobs.drop(stale)
            self._jobs.leased.add(number)
        claimed = await self._store_call(self._queue.joined, number)
        if claimed is None:
            return None
        try:
            job, why = await self._planned(claimed, plan), "other code, weights, hardware or threads"
        except (SQLAlchemyError, EngineStopping):
            raise
        except Exception as error:
            job, why = None, str(error)
        if job is None or job.digest != plan:
            log.info("job_left_to_others", job=claimed.id, why=why)
            await self._store_call(self._queue.leave, number, plan)
            return None
        self._jobs.active[number] = job
        log.info("job_joined", job=job.id, units=len(job.keys))
        return job

    async def _planned(self, claimed: Claimed, digest: str | None = None) -> ActiveJob:
        """The job with every stage that stored outcomes lead to, so that finished units keep their places. It ends at
        the plan with this ``digest``: other jobs may have measured units of later stages."""

        def plan() -> ActiveJob:
            request = request_of(claimed.request)
            return ActiveJob(claimed, planned(request, claimed.tenant, claimed.id, self._models, self._settings))

        job = await self._beside(plan)
        outcomes: list[Outcome] = []

        def stored() -> list[Outcome | None]:
            return [self._queue.outcome(key) for key in job.keys[len(outcomes) :]]

        while job.plan.in_stages and job.digest != digest:
            found = await self._store_call(stored)
            outcomes += (outcome for outcome in found if outcome is not None)
            if len(outcomes) < len(job.keys) or not await self._beside(job.extend, outcomes):
                break
        return job

    async def _go_on(self, job: ActiveJob, left: set[int]) -> None:
        """Take the outcomes that the store has of the positions ``left``. The rest becomes rows for every process.
        Without a rest, the job goes on with its next stage or its result."""
        positions = sorted(left)
        for start in range(0, len(positions), AT_ONCE):
            if found := await self._store_call(self._stored, job, positions[start : start + AT_ONCE]):
                if await self._store_call(self._queue.record, job.number, found) is Recorded.LOST:
                    raise LeaseLost
                left = left - {unit.position for unit in found}
                self._jobs.changed.fire()
        if left:
            await self._store_call(self._queue.enter, job.number, job.digest, job.rows(left))
            self._jobs.added.fire()
        else:
            await self._complete(job)

    def _stored(self, job: ActiveJob, positions: list[int]) -> list[Finished]:
        found = ((position, self._queue.outcome(job.keys[position])) for position in positions)
        return [job.finished(position, outcome) for position, outcome in found if outcome is not None]

    async def run(self, job: ActiveJob, claimed: ClaimedUnit, served: ServedModel) -> None:
        """One unit to its end: recorded, claimed still, or the end of its job."""
        position, recorded = claimed.position, False
        try:
            found = await self._store_call(self._stored, job, [position]) if claimed.stored else []
            is_last = await self._finished(job, (found or [await self._measured(job, position, served)])[0])
            recorded = True
            if is_last:
                await self._complete(job)
        except asyncio.CancelledError:
            if not job.dropped or self._jobs.closed:  # a dropped job's unit ends, a closed runner's worker does too
                raise
        except LeaseLost:
            self._jobs.drop(job)
        except (QueueFull, SlotsExhausted):
            await self._later(job, claimed, served)
        except (EngineStopping, SQLAlchemyError):
            raise
        except (OutOfMemory, EngineFailed) as error:
            job.failures[position] += 1
            log.warning("unit_failed", job=job.id, error=str(error), failures=job.failures[position])
            if job.failures[position] > MOST_RETRIES:
                await self._fail(job.number, job.id, error, job.place(position))
            else:
                await self._later(job, claimed, served)
        except Exception as error:
            await self._fail(job.number, job.id, error, "" if recorded else job.place(position))
        finally:
            self._forget_progress(job, position)

    async def _later(self, job: ActiveJob, claimed: ClaimedUnit, served: ServedModel) -> None:
        job.claimed[served.name].appendleft(claimed)
        await asyncio.sleep(RETRY_S)

    def _forget_progress(self, job: ActiveJob, position: int) -> None:
        job.in_flight.pop(position, None)
        self._jobs.note_in_flight(job)

    async def _measured(self, job: ActiveJob, position: int, served: ServedModel) -> Finished:
        """The unit's outcome from the model's engine.

        Raises:
            asyncio.CancelledError: when the job was dropped meanwhile.
            Exception: whatever the engine or the unit raises.
        """
        unit, began = job.plan.units[position], time.perf_counter()

        def read(tokens: int) -> None:
            job.in_flight[position] = AtWork(tokens, began)
            self._jobs.note_in_flight(job)

        def report(tokens: int) -> None:
            if not task.done():
                read(job.in_flight[position].tokens + tokens)
                self._jobs.changed.fire()

        read(0)
        with context.acting_for(job.tenant):
            scored = {unit.method.method: unit.tokens}
            held = held_tokens(unit, served.score_chunk)
            scoring = served.engine.score(unit.run(), held, report, scored=scored)
            task: asyncio.Task[Outcome] = asyncio.create_task(scoring)
        job.running.add(task)
        try:
            outcome = await task
        finally:
            job.running.discard(task)
        seconds = time.perf_counter() - began
        job.took(served.name, seconds)
        return await self._beside(job.finished, position, outcome, seconds)

    async def _finished(self, job: ActiveJob, unit: Finished) -> bool:
        """Put a finished unit on disk; true after the last one: the next stage or the result is due."""
        recorded = await self._store_call(self._queue.record, job.number, [unit])
        if recorded is Recorded.LOST:
            raise LeaseLost
        self._forget_progress(job, unit.position)
        self._jobs.changed.fire()
        return recorded is Recorded.LAST

    async def _complete(self, job: ActiveJob) -> None:
        """Outcomes become the next stage or the result; those that are lost or damaged are measured again first."""
        outcomes = await self._store_call(self._queue.outcomes, job.number)
        positions = range(len(job.keys))
        if lost := set(positions) - outcomes.keys():
            await self._go_on(job, lost)
            return
        in_order = [outcomes[position] for position in positions]
        if job.plan.in_stages and await self._beside(job.extend, in_order):
            finished = await self._store_call(self._queue.begin, job.number, job.keys, job.plan.cost)
            await self._go_on(job, set(range(len(job.keys))) - finished)
            return

        def result() -> Packed:
            return pack(result_of(job.plan, in_order, job.id, self._models))

        if not await self._store_call(self._queue.finish, job.number, await self._beside(result)):
            raise LeaseLost
        self._jobs.forget(job.number)
        self._jobs.changed.fire()
        log.info("job_done", job=job.id)

    async def _fail(self, number: int, job_id: str, error: Exception, place: str = "") -> None:
        """End a job with ``error``, in the words and with the code that a route would answer. ``place``: its unit."""
        told = self._as_api_error(error)
        unexpected = error if told.status == 500 else None
        message = f"{place}: {told.message}" if place else told.message
        log.warning("job_failed", job=job_id, code=told.code, error=message, exc_info=unexpected)
        # PostgreSQL takes no NUL, and the message may quote what was sent.
        await self._store_call(self._queue.fail, number, told.code or "error", message.replace("\0", ""))
        if job := self._jobs.active.get(number):
            self._jobs.drop(job)
        self._jobs.forget(number)

    async def _beside(
        self, function: Callable[Parameters, Returned], *args: Parameters.args, **options: Parameters.kwargs
    ) -> Returned:
        """Call ``function`` on a thread beside the model. Without API keys, jobs and requests wait in one queue there:
        as long as it is full, this tries again."""
        with context.acting_for(RUNNER):
            while True:
                try:
                    return await self._workers.run(function, *args, **options)
                except QueueFull:
                    await asyncio.sleep(RETRY_S)
