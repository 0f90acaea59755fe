"""Prompts that an evaluation wrote. No job and no result keeps them: its plan writes them again."""

from __future__ import annotations

from collections.abc import Sequence

from service.errors import ApiError
from service.evaluation.catalogue import plan_of, result_in
from service.evaluation.checks import InvalidEvaluation
from service.evaluation.unit import Plan
from service.jobs.planning import planned, request_of
from service.jobs.records import UnitDone
from service.jobs.storage.measured import Measured
from service.jobs.storage.results import Packed, pack
from service.models.registry import ModelRegistry, UnknownModel
from service.settings import Settings


class OtherSetup(ApiError):
    """The models, limits or code are not those of the job."""


def with_prompts(packed: Packed, job: Measured, models: ModelRegistry, settings: Settings) -> Packed:
    """The result of ``job`` with the prompt of every output.

    Raises:
        ApiError: as ``units_with_prompts``.
    """
    result = result_in(packed.data, packed.evaluation)
    if not result.outputs():  # as of a sweep over texts
        return packed
    plan = _planned_again(job, models, settings, in_part=result.partial is not None)
    prompts = _bounded([unit.prompt for unit in plan.units], settings)
    asked = [prompt for prompt in prompts if prompt is not None]
    for output, prompt in zip(result.outputs(), asked, strict=True):
        output.prompt = prompt
    return pack(result)


def units_with_prompts(
    units: Sequence[UnitDone], job: Measured, models: ModelRegistry, settings: Settings
) -> list[UnitDone]:
    """The finished ``units`` of ``job`` with their prompts.

    Raises:
        OtherSetup: 409 after a change of models, limits or code.
        ApiError: 400 for prompts longer than an answer may be.
    """
    plan = _planned_again(job, models, settings, in_part=False)
    prompts = _bounded([plan.units[unit.position].prompt for unit in units], settings)
    return [unit.model_copy(update={"prompt": prompt}) for unit, prompt in zip(units, prompts, strict=True)]


def _planned_again(job: Measured, models: ModelRegistry, settings: Settings, *, in_part: bool) -> Plan:
    """The plan of ``job``, or that of its partial result. The addresses of its units show that it is the same."""
    try:
        request = request_of(job.request)
        whole = planned(request, job.tenant, job.id, models, settings)
        if dict(enumerate(whole.keys)).items() >= job.finished.items():
            if not in_part:
                return whole.plan
            if (reduced := whole.plan.reduced(request, job.finished)) is not None:
                return plan_of(reduced, models, settings)
    except (UnknownModel, InvalidEvaluation):
        pass
    why = "the job is of other code, weights or limits than this server has, so its prompts cannot be written again"
    raise OtherSetup(409, f"include_text: {why}", code="other_setup", param="include_text")


def _bounded(prompts: list[str | None], settings: Settings) -> list[str | None]:
    """Raises:
    ApiError: 400 for prompts longer than an answer may be.
    """
    size, most = sum(len(prompt or "") for prompt in prompts), settings.max_answer_bytes
    if size > most:
        message = f"include_text: the prompts have {size} characters, and an answer at most {most} bytes"
        raise ApiError(400, f"{message}: ask for fewer methods or lengths", code="answer_too_large")
    return prompts
