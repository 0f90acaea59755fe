"""``/policies``: a recommendation becomes the choice of ``auto``, for one API key and one model."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import ConfigDict, Field

from patches import KnownFields
from service import context
from service.api.http.routing import Route
from service.api.response_models.encodings import PolicyInfo
from service.api.store import store_of, stored
from service.errors import ApiError, bad_request
from service.evaluation.catalogue import result_in
from service.jobs.storage.refusals import hint
from service.jobs.storage.results import Packed
from service.models.policies import check_policy, out_of_reach
from service.models.registry import ModelRegistry, ServedModel
from service.policy.policy import InvalidPolicy, Policy

router = APIRouter(prefix="/policies", tags=["methods"], route_class=Route)


class PolicyRequest(KnownFields):
    """The id of a result that names encodings by length: of a job, or of a request answered at once."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"result": "0" * 32}]})

    result: str = Field(min_length=1, max_length=64)
    partial: bool = Field(False, description="Take a result of a job that ended early too; it is refused otherwise.")


@router.post("", response_model=PolicyInfo)
async def calibrate(body: PolicyRequest, request: Request) -> JSONResponse:
    """Make the encodings of a recommendation those of `auto`, for this API key and the model that it measured.

    The answer is the policy, as a file for `ropeway serve --policy` has it.
    """
    tenant, store = context.current().tenant, store_of(request)
    packed = await stored(request, store.find_result, tenant, body.result)
    if packed is None:
        raise ApiError(404, f"no such result{hint(body.result)}", param="result", code="not_found")
    policy = await request.app.state.workers.run(_policy, packed, body.partial, request.app.state.models)
    await stored(request, store.put_policy, tenant, policy)
    return _shown(policy, request.app.state.models.get(policy.model))


@router.get("/{model:path}", response_model=PolicyInfo)
async def policy(model: str, request: Request) -> JSONResponse:
    """The policy of this API key for a model; 404 without one."""
    try:
        served = request.app.state.models.get(model)
        found = await stored(request, store_of(request).policy_of, context.current().tenant, served.contents)
    except InvalidPolicy as error:
        raise bad_request(f"model: the stored policy cannot be read, calibrate again: {error}", "model") from error
    if found is None:
        raise _without(served, request)
    return _shown(found, served)


@router.delete("/{model:path}", status_code=204)
async def forget(model: str, request: Request) -> None:
    """Remove the policy of this API key for a model: `auto` follows the operator's policy or the rule again."""
    served = request.app.state.models.get(model)
    if not await stored(request, store_of(request).drop_policy, context.current().tenant, served.contents):
        raise _without(served, request)


def _without(served: ServedModel, request: Request) -> ApiError:
    owner = "API key" if request.app.state.keys.asked_for else "server"
    message = f"this {owner} has no policy for {served.name!r} from a recommendation"
    return ApiError(404, message, param="model", code="not_found")


def _shown(policy: Policy, served: ServedModel) -> JSONResponse:
    """The policy with the cautions that depend on this server, which are not stored."""
    last = policy.ranges[-1].up_to
    cautions = [] if last is None else out_of_reach(last, served)
    if served.policy is not None:
        cautions.append(f"`auto` follows the operator's policy file for {served.name}, and not this policy.")
    return JSONResponse(policy.model_copy(update={"notes": (*policy.notes, *cautions)}).model_dump(mode="json"))


def _policy(packed: Packed, partial: bool, models: ModelRegistry) -> Policy:
    """Raises:
    ApiError: 400 for a result without encodings by length, or of weights that are not served. 409 for a partial one,
        unless ``partial`` allows it.
    """
    result = result_in(packed.data, packed.evaluation)
    try:
        policy = result.policy(datetime.now(UTC))
        if policy is None:
            raise bad_request(f"result: {packed.evaluation} names no encodings by length", "result")
        if result.partial is not None and not partial:
            why = f"the job ended early ({result.partial.words()}): resume it, or send partial true"
            raise ApiError(409, f"result: {why}", param="result", code="partial_result")
        check_policy(policy, models.get(policy.model), models)
    except InvalidPolicy as error:
        raise bad_request(f"result: {error}", "result") from error
    return policy
