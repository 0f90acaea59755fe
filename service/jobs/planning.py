"""From a job's request to its units and their addresses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from patches import Method, problems_of
from service.evaluation.catalogue import EVALUATIONS, plan_of
from service.evaluation.checks import InvalidEvaluation
from service.evaluation.request import EvaluationRequest
from service.evaluation.results import EvaluationResult
from service.evaluation.setup import setup_of
from service.evaluation.unit import Outcome, Plan, Unit
from service.jobs.address import Addresses
from service.models.registry import ModelRegistry
from service.policy.auto import Auto
from service.settings import Settings


class Planned(NamedTuple):
    """``keys`` are the addresses of the plan's units, in their order, as ``address`` gives them."""

    plan: Plan
    keys: list[str]
    address: Callable[[Unit], str]

    @property
    def digest(self) -> str:
        """SHA-256 of the keys. Servers of other code, hardware or weights have another one."""
        return hashlib.sha256("".join(self.keys).encode()).hexdigest()

    def extended(self, outcomes: Sequence[Outcome]) -> Planned | None:
        """The plan with its next stage; None after the last one."""
        plan = self.plan.extended(outcomes)
        if plan is None:
            return None
        return Planned(plan, [*self.keys, *map(self.address, plan.units[len(self.keys) :])], self.address)


def result_of(plan: Plan, outcomes: Sequence[Outcome], job_id: str, models: ModelRegistry) -> EvaluationResult:
    """The result of a job, which has no time: it equals that of an uninterrupted run."""
    result = plan.result(outcomes)
    result.id, result.setup = job_id, setup_of(result.models(), models)
    return result


def request_of(body: dict[str, Any]) -> EvaluationRequest:
    """The request that a job was made of.

    Raises:
        InvalidEvaluation: for one that another version took, and this one does not.
    """
    evaluation = EVALUATIONS.get(body["evaluation"])
    if evaluation is None:
        raise InvalidEvaluation("evaluation", f"this version has no {body['evaluation']}, of which the job was made")
    try:
        return evaluation.request.model_validate(body)
    except ValidationError as error:
        first = problems_of(error.errors())[0]
        why = f"{first.message}; another version of the server took this request"
        raise InvalidEvaluation(first.field or "request", why) from error


def body_of(request: EvaluationRequest) -> dict[str, Any]:
    """The body as a client would send it, with the names of the evaluation and of each method. A default text is in it
    too: listings show it."""
    body = request.model_dump(mode="json", exclude_unset=True) | {"evaluation": request.evaluation}
    if "input" not in body and request.reads_documents(body) and request.texts():
        body["input"] = request.texts()[0]
    if "methods" in body:
        pairs = zip(request.methods, body["methods"], strict=True)
        body["methods"] = [{"method": method.method} | fields for method, fields in pairs]
    return body


def _asked_by(request: EvaluationRequest) -> dict[str, Any]:
    """The request without its spelling and its route, for comparison."""
    return request.model_dump(mode="json", exclude={"background"})


def is_repeat(sent: EvaluationRequest, made: EvaluationRequest) -> bool:
    """True if ``sent`` asks for the job that ``made`` became. Ranges that ``made`` got at admission do not count:
    ``sent`` has an ``auto`` without any there, and a new policy changes its meaning."""
    if sent.evaluation != made.evaluation or len(sent.methods) != len(made.methods):
        return False
    pairs = zip(sent.methods, made.methods, strict=True)
    methods = [asked if _is_auto_of(asked, method) else method for asked, method in pairs]
    return _asked_by(sent) == _asked_by(made.model_copy(update={"methods": methods}))


def _is_auto_of(asked: Method, made: Method) -> bool:
    if not (isinstance(asked, Auto) and isinstance(made, Auto)):
        return False
    return asked.ranges is None and made.origin.source != "request"


def planned(request: EvaluationRequest, tenant: str, job_id: str, models: ModelRegistry, settings: Settings) -> Planned:
    """The plan of a job of ``tenant``.

    Raises:
        UnknownModel: for a model that is not served.
        InvalidEvaluation: for anything else that cannot be run as asked.
    """
    plan, addresses = plan_of(request, models, settings), Addresses(models)
    own = None if request.reuse else job_id

    def address(unit: Unit) -> str:
        return addresses.key(unit, tenant, own)

    return Planned(plan, list(map(address, plan.units)), address)


def replayed(planned: Planned, outcome: Callable[[str], Outcome | None]) -> tuple[Planned, list[Outcome]]:
    """The plan with every stage that stored outcomes lead to, and those outcomes up to the first missing one.

    ``outcome`` gives the outcome at an address.
    """
    outcomes: list[Outcome] = []
    while True:
        for key in planned.keys[len(outcomes) :]:
            if (stored := outcome(key)) is None:
                return planned, outcomes
            outcomes.append(stored)
        if (extended := planned.extended(outcomes)) is None:
            return planned, outcomes
        planned = extended
