"""Units of jobs at work: measured by the engine, recorded in the database, and their result at the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import structlog
from sqlalchemy.exc import SQLAlchemyError

from patches import SlotsExhausted
from service import context
from service.engine.failures import EngineFailed, EngineStopping
from service.engine.out_of_memory import OutOfMemory
from service.errors import ApiError
from service.evaluation.unit import Outcome
from service.jobs.active import ActiveJob, ActiveJobs
from service.jobs.planning import planned, request_of
from service.jobs.storage.calls import RETRY_S, PatientCalls
from service.jobs.storage.queue import Claimed, Finished, JobQueue, LeaseLost
from service.jobs.storage.results import Packed, pack
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
    """Claims jobs of ``queue`` and runs their units on ``models``. ``as_api_error`` words the failure of a job as a
    route would answer it."""

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

    async def activate(self, number: int) -> ActiveJob | None:
        """Claim and plan a job, and take what the store has of it; None when nothing of it is left to do here."""
        claimed = await self._store_call(self._queue.claim, number)
        if claimed is None:
            return None
        self._jobs.held.add(number)
        try:
            job = await self._beside(self._planned, claimed)
            await self._replay(job)
            finished = await self._store_call(self._queue.begin, number, job.keys, job.plan.tokens)
            job.leave(set(range(len(job.keys))) - finished)
            self._jobs.active[number] = job
            log.info("job_started", job=job.id, units=len(job.keys), finished=len(finished))
            await self._take(job, sorted(job.left))
        except LeaseLost:
            self._jobs.forget(number)
            return None
        except SQLAlchemyError:
            self._jobs.forget(number)
            raise
        except Exception as error:
            await self._fail(number, claimed.id, error)
            return None
        return job

    def _planned(self, claimed: Claimed) -> ActiveJob:
        request = request_of(claimed.request)
        return ActiveJob(claimed, planned(request, claimed.tenant, claimed.id, self._models, self._settings))

    async def _replay(self, job: ActiveJob) -> None:
        """Add the stages that stored outcomes lead to, so that their finished units keep their places."""
        outcomes: list[Outcome] = []

        def stored() -> list[Outcome | None]:
            return [self._queue.outcome(key) for key in job.keys[len(outcomes) :]]

        while job.plan.in_stages:
            found = await self._store_call(stored)
            outcomes += (outcome for outcome in found if outcome is not None)
            if len(outcomes) < len(job.keys) or not await self._beside(job.extend, outcomes):
                return

    async def _next_stage(self, job: ActiveJob, outcomes: list[Outcome]) -> bool:
        """Go on with the plan's next stage; false after the last one."""
        if not job.plan.in_stages or not await self._beside(job.extend, outcomes):
            return False
        await self._store_call(self._queue.begin, job.number, job.keys, job.plan.tokens)
        job.left = set(range(len(outcomes), len(job.keys)))
        await self._take(job, sorted(job.left))
        job.leave(job.left)
        self._jobs.added.fire()
        return True

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

    async def run(self, job: ActiveJob, position: int, served: ServedModel) -> None:
        """One unit to its end: recorded, put back, or the end of its job."""
        try:
            if not await self._take(job, [position]):
                await self._finished(job, [await self._measured(job, position, served)])
        except asyncio.CancelledError:
            if not job.dropped or self._jobs.closed:  # a dropped job's unit ends, a closed runner's worker does too
                raise
        except LeaseLost:
            self._jobs.drop(job)
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
            self._jobs.note_in_flight(job)

    async def _measured(self, job: ActiveJob, position: int, served: ServedModel) -> Finished:
        """The unit's outcome from the model's engine.

        Raises:
            asyncio.CancelledError: when the job was dropped meanwhile; and whatever the engine or the unit raises.
        """
        unit, began = job.plan.units[position], time.perf_counter()

        def report(tokens: int) -> None:
            if not task.done():
                job.in_flight[position] += tokens
                self._jobs.note_in_flight(job)
                self._jobs.changed.fire()

        with context.acting_for(job.tenant):
            scored = {unit.method.method: unit.tokens}
            scoring = served.engine.score(unit.run(), unit.length, report, scored=scored)
            task: asyncio.Task[Outcome] = asyncio.create_task(scoring)
        job.running.add(task)
        try:
            outcome = await task
        finally:
            job.running.discard(task)
        seconds = time.perf_counter() - began
        return await self._beside(job.finished, position, outcome, seconds)

    async def _finished(self, job: ActiveJob, units: list[Finished]) -> None:
        """Put finished units on disk; after the last one, the result."""
        if units and not await self._store_call(self._queue.record, job.number, units):
            raise LeaseLost
        job.left -= {unit.position for unit in units}
        self._jobs.changed.fire()
        if not job.left:
            await self._complete(job)

    async def _complete(self, job: ActiveJob) -> None:
        """Outcomes become the next stage or the result; those that are lost or damaged are measured again first."""
        outcomes = await self._store_call(self._queue.outcomes, job.number)
        positions = range(len(job.keys))
        if lost := set(positions) - outcomes.keys():
            job.leave(lost)
            self._jobs.added.fire()
            return

        in_order = [outcomes[position] for position in positions]
        if await self._next_stage(job, in_order):
            return

        def result() -> Packed:
            result = job.plan.result(in_order)
            result.id, result.seconds = job.id, None
            return pack(result)

        if not await self._store_call(self._queue.finish, job.number, await self._beside(result)):
            raise LeaseLost
        self._jobs.forget(job.number)
        log.info("job_done", job=job.id)

    async def _fail(self, number: int, job_id: str, error: Exception) -> None:
        """End a job with ``error``, in the words and with the code that a route would answer."""
        told = self._as_api_error(error)
        unexpected = error if told.status == 500 else None
        log.warning("job_failed", job=job_id, code=told.code, error=told.message, exc_info=unexpected)
        if job := self._jobs.active.get(number):
            self._jobs.drop(job)
        # PostgreSQL takes no NUL, and the message may quote what was sent.
        await self._store_call(self._queue.fail, number, told.code or "error", told.message.replace("\0", ""))
        self._jobs.forget(number)

    async def _beside(
        self, function: Callable[Parameters, Returned], *args: Parameters.args, **options: Parameters.kwargs
    ) -> Returned:
        """Call ``function`` on a thread beside the model. Jobs have their own place there: no tenant fills it."""
        with context.acting_for(RUNNER):
            return await self._workers.run(function, *args, **options)
