"""From a job's request to its units and their addresses."""

from __future__ import annotations

from typing import Any, NamedTuple

from service.evaluation.catalogue import EVALUATIONS, plan_of
from service.evaluation.request import EvaluationRequest
from service.evaluation.unit import Plan
from service.jobs.address import Addresses
from service.models.registry import ModelRegistry
from service.settings import Settings


class Planned(NamedTuple):
    """``keys`` are the addresses of the plan's units, in their order."""

    plan: Plan
    keys: list[str]


def request_of(body: dict[str, Any]) -> EvaluationRequest:
    """The request that a job was made of."""
    return EVALUATIONS[body["evaluation"]].request.model_validate(body)


def body_of(request: EvaluationRequest) -> dict[str, Any]:
    """The body as a client would send it, with the names of the evaluation and of each method."""
    body = request.model_dump(mode="json", exclude_unset=True) | {"evaluation": request.evaluation}
    if "methods" in body:
        pairs = zip(request.methods, body["methods"], strict=True)
        body["methods"] = [{"method": method.method} | fields for method, fields in pairs]
    return body


def asked_by(request: EvaluationRequest) -> dict[str, Any]:
    """The request without its spelling and its route, for comparison."""
    return request.model_dump(mode="json", exclude={"background"})


def planned(request: EvaluationRequest, tenant: str, job_id: str, models: ModelRegistry, settings: Settings) -> Planned:
    """The plan of a job of ``tenant``.

    Raises:
        UnknownModel: for a model that is not served.
        InvalidEvaluation: for anything else that cannot be run as asked.
    """
    plan, addresses = plan_of(request, models, settings), Addresses(models)
    own = None if request.reuse else job_id
    return Planned(plan, [addresses.key(unit, tenant, own) for unit in plan.units])
