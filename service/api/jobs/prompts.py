"""Prompts that an evaluation wrote, where ``include_text`` asks for them."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request

from service.api.jobs.partial import measured_job
from service.errors import bad_request
from service.evaluation.catalogue import EVALUATIONS
from service.jobs import prompts
from service.jobs.prompts import OtherSetup as OtherSetup
from service.jobs.records import UnitDone
from service.jobs.storage.results import Packed

WithPrompts = Annotated[
    bool, Query(description="With the prompts that the evaluation wrote: passkey, needle, RULER and sweeps of these.")
]


def writes_prompts(evaluation: str) -> bool:
    return EVALUATIONS[evaluation].request.writes_prompts


def check(evaluation: str) -> None:
    """Raises:
    ApiError: 400 for an evaluation that writes no prompts.
    """
    if not writes_prompts(evaluation):
        why = f"{evaluation} writes no prompts; the job has the texts that were sent"
        raise bad_request(f"include_text: {why}", "include_text")


async def in_result(packed: Packed, job_id: str, request: Request) -> Packed:
    """The result of a job with its prompts.

    Raises:
        ApiError: where they cannot be written again; QueueFull from the workers.
    """
    state, job = request.app.state, await measured_job(job_id, request)
    if job is None:  # it has gone on since
        return packed
    found: Packed = await state.workers.run(prompts.with_prompts, packed, job, state.models, state.settings)
    return found


async def in_units(units: list[UnitDone], job_id: str, request: Request) -> list[UnitDone]:
    """Finished units of a job with their prompts.

    Raises:
        ApiError: where they cannot be written again; QueueFull from the workers.
    """
    state, job = request.app.state, await measured_job(job_id, request)
    if job is None:
        return units
    found: list[UnitDone] = await state.workers.run(
        prompts.units_with_prompts, units, job, state.models, state.settings
    )
    return found
