"""``auto`` at admission: the ranges of the operator's policy, of the tenant's calibration, or of the rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from fastapi import Request

from patches import Method
from service import context
from service.api.response_models.encodings import AutoChoice, AutoRanges
from service.api.store import store_of, stored
from service.errors import bad_request
from service.evaluation.request import EvaluationRequest
from service.jobs.database.opening import StoreOutOfReach
from service.models.policies import auto_by_rule, check_weights
from service.models.registry import ServedModel
from service.policy.auto import AUTO, Auto
from service.policy.policy import InvalidPolicy

AnyEvaluation = TypeVar("AnyEvaluation", bound=EvaluationRequest)


async def with_ranges(
    methods: Sequence[Method], served: ServedModel, request: Request, param: str = "pe"
) -> list[Method]:
    """``methods``, with the ranges in use for ``served`` for every ``auto`` without any. They came in ``param``.

    Raises:
        ApiError: 400 for a stored policy that this version cannot read; StoreOutOfReach from the database.
    """
    without = [isinstance(method, Auto) and method.ranges is None for method in methods]
    if not any(without):
        return list(methods)
    if any(method.follows for method, alone in zip(methods, without, strict=True) if alone):
        raise bad_request(f"{param}: {AUTO} with numbers of an answer needs its ranges too", param)
    try:
        auto = await ranges_in_use(served, request)
    except InvalidPolicy as error:
        message = f"{param}: the stored policy of {served.name!r} cannot be read, calibrate again: {error}"
        raise bad_request(message, param) from error
    return [auto if alone else method for method, alone in zip(methods, without, strict=True)]


async def ranges_in_use(served: ServedModel, request: Request) -> Auto:
    """The method of ``auto`` for ``served`` and the current tenant.

    The operator's policy is for all tenants, a calibration for the tenant that ran it.

    Raises:
        InvalidPolicy: for a stored policy that this version cannot read; StoreOutOfReach from the database.
    """
    if served.policy is not None:
        return served.policy.auto("file")
    policy = await stored(request, store_of(request).policy_of, context.current().tenant, served.contents)
    return auto_by_rule(served) if policy is None else policy.auto("calibration")


async def in_listings(served: ServedModel, request: Request) -> AutoRanges | None:
    """The ranges in use for ``served``; None if the database is out of reach, or has a policy of another version."""
    try:
        auto = await ranges_in_use(served, request)
    except (InvalidPolicy, StoreOutOfReach):
        return None
    return AutoRanges(**auto.origin.model_dump(), ranges=[found.model_dump() for found in auto.ranges or ()])


async def with_methods(body: AnyEvaluation, request: Request) -> AnyEvaluation:
    """``body`` with the ranges of every ``auto`` among its methods."""
    if not any(isinstance(method, Auto) for method in body.methods):
        return body
    served = request.app.state.models.get(body.model)
    return body.model_copy(update={"methods": await with_ranges(body.methods, served, request, "methods")})


def choice_of(method: Method, length: int, served: ServedModel, request: Request) -> AutoChoice | None:
    """The choice of ``auto`` for a reserved length; None for any other method.

    Raises:
        ApiError: 400 for an encoding that a variant of ``served`` answers.
    """
    if not isinstance(method, Auto):
        return None
    above, found = method.chosen(length)
    try:
        check_weights(found.pe, served, request.app.state.models)
    except InvalidPolicy as error:
        raise bad_request(f"pe: {error}", "pe") from error
    return AutoChoice(**method.origin.model_dump(), above=above, up_to=found.up_to)
