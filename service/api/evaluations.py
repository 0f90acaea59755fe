"""One route per evaluation, and its result again as table and picture."""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from service import context
from service.api import drawing
from service.api.admission import admit, charge, log_prompts, set_deadline, upper_bound
from service.api.jobs import IdempotencyKey, submit
from service.api.pages import page
from service.api.streaming import ClientGone, Emit, event_stream, unless_disconnected
from service.engine.admission import Ticket
from service.errors import ApiError, bad_request
from service.evaluation.catalogue import EVALUATIONS, Evaluation
from service.evaluation.documents import BUILT_IN
from service.evaluation.request import EvaluationRequest
from service.evaluation.results import EvaluationResult, Progress
from service.evaluation.tables import csv_of
from service.evaluation.unit import Measured, Plan, run_units
from service.jobs.records import JobInfo
from service.models.registry import ModelRegistry
from service.settings import Settings


class RecentResults:
    """The last results, so that a picture is one request away. Each belongs to the API key that made it: to
    others it does not exist."""

    def __init__(self, most: int = 128) -> None:
        self._most = most
        self._results: OrderedDict[tuple[str, str], EvaluationResult] = OrderedDict()

    def add(self, result: EvaluationResult) -> EvaluationResult:
        """Keep ``result`` for the current tenant and put its id and links into it."""
        result.id = context.new_id()
        result.links = {
            name: f"/{result.evaluation}/{result.id}/{file}"
            for name, file in (("csv", "table.csv"), ("png", "plot.png"), ("html", "plot.html"))
        }
        self._results[context.current().tenant, result.id] = result
        while len(self._results) > self._most:
            self._results.popitem(last=False)
        return result

    def get(self, evaluation: str, result_id: str) -> EvaluationResult:
        """The current tenant's result.

        Raises:
            ApiError: 404 when there is none.
        """
        result = self._results.get((context.current().tenant, result_id))
        if result is None or result.evaluation != evaluation:
            raise ApiError(404, "no such result: the server keeps the most recent ones only", code="not_found")
        return result


async def answer(evaluation: Evaluation, body: EvaluationRequest, request: Request, key: str | None) -> Any:
    """Run one evaluation for one request, or queue it under the idempotency key ``key``."""
    if body.background:
        return await submit(body, request, key)
    if "reuse" in body.model_fields_set:
        raise bad_request("reuse is for jobs: send it with background, or to /jobs; here all is measured", "reuse")
    state = request.app.state
    models: ModelRegistry = state.models
    tickets = await _admit(body, models, request)
    plan = await run_in_threadpool(evaluation.plan, body, models, state.settings)
    await charge(request, plan.tokens)

    if body.stream:

        async def stream(emit: Emit) -> None:
            result = await _run(plan, models, tickets, lambda p: emit(p.model_dump_json(), "progress"))
            emit(state.results.add(result).model_dump_json(), "result")

        return event_stream(stream)
    try:
        work = _run(plan, models, tickets, lambda progress: None)
        result = state.results.add(await unless_disconnected(request, work))
    except ClientGone:
        return JSONResponse(None, status_code=499)
    if "text/csv" in request.headers.get("accept", ""):
        return Response(csv_of(result), media_type="text/csv")
    return result


async def _admit(body: EvaluationRequest, models: ModelRegistry, request: Request) -> dict[str, Ticket]:
    """A place for every model that the evaluation touches, before a document is tokenized."""
    settings: Settings = request.app.state.settings
    set_deadline(body.timeout_s, settings)
    served = models.get(body.model)
    targets = {target.name: target for target in (models.for_method(served, method) for method in body.methods)}
    texts, lengths = body.texts(), body.length_values()
    wanted = []
    for target in targets.values():
        capacity = target.engine.scores.capacity
        unknown = not texts or any(isinstance(item, str) and item in BUILT_IN for item in texts)
        longest = capacity if unknown else max(upper_bound(item, capacity) for item in texts)
        wanted.append((target.engine.scores, min(longest, lengths[-1]) if lengths else longest))
    tickets = await admit(request, wanted)
    log_prompts(request, texts)
    return dict(zip(targets, tickets, strict=True))


async def _run(
    plan: Plan, models: ModelRegistry, tickets: dict[str, Ticket], on_progress: Callable[[Progress], None]
) -> EvaluationResult:
    """Run the whole plan, one generation thread after another for the models that it touches."""
    began = time.perf_counter()
    parts: dict[str, list[int]] = {}
    for index, unit in enumerate(plan.units):
        parts.setdefault(unit.subject.model, []).append(index)
    done = 0
    measured: dict[int, Measured] = {}
    for name, indices in parts.items():

        def report(progress: Progress, done: int = done) -> None:
            seconds = time.perf_counter() - began
            on_progress(
                Progress(
                    tokens_done=done + progress.tokens_done,
                    tokens_total=plan.tokens,
                    label=progress.label,
                    seconds=seconds,
                )
            )

        units, engine = [plan.units[index] for index in indices], models.get(name).engine
        longest = max(unit.length for unit in units)
        part: list[Measured] = await engine.run(run_units(units), longest, report, ticket=tickets.get(name))
        for unit in units:
            engine.metrics.scored(unit.subject.method.method, unit.tokens)
        done += sum(unit.tokens for unit in units)
        measured.update(zip(indices, part, strict=True))
    result = await run_in_threadpool(plan.result, [measured[index].outcome for index in range(len(plan.units))])
    result.seconds = time.perf_counter() - began
    return result


def _routes_of(evaluation: Evaluation) -> APIRouter:
    """POST to measure; GET the recent result again, as JSON, table and picture."""
    router = APIRouter(prefix=f"/{evaluation.name}", tags=[evaluation.name])
    example = {"demo": {"value": evaluation.example()}}
    in_other_forms: dict[int | str, dict[str, Any]] = {
        200: {"content": {"text/csv": {}, "text/event-stream": {}}},
        202: {"model": JobInfo, "description": "With `background`: the job that it has become."},
    }

    def recent(request: Request, result_id: str) -> EvaluationResult:
        results: RecentResults = request.app.state.results
        return results.get(evaluation.name, result_id)

    @router.post(
        "", response_model=evaluation.result, responses=in_other_forms, summary=evaluation.summary, name=evaluation.name
    )
    async def measure(
        body: Annotated[evaluation.request, Body(openapi_examples=example)],  # type: ignore[name-defined]
        request: Request,
        idempotency_key: IdempotencyKey = None,
    ) -> Any:
        return await answer(evaluation, body, request, idempotency_key)

    @router.get("/{result_id}", response_model=evaluation.result, summary="A recent result again.")
    async def again(result_id: str, request: Request) -> EvaluationResult:
        return recent(request, result_id)

    @router.get("/{result_id}/table.csv", response_class=Response, responses=_only("text/csv"))
    async def table(result_id: str, request: Request) -> Response:
        """Every number as a long table."""
        return Response(csv_of(recent(request, result_id)), media_type="text/csv")

    @router.get("/{result_id}/plot.png", response_class=Response, responses=_only("image/png"))
    async def plot_png(result_id: str, request: Request) -> Response:
        """The result as a picture."""
        png = await run_in_threadpool(drawing.png, recent(request, result_id))
        return Response(png, media_type="image/png")

    @router.get("/{result_id}/plot.html", response_class=Response, responses=_only("text/html"))
    async def plot_html(result_id: str, request: Request) -> Response:
        """The result as an interactive page without outside resources."""
        return page(await run_in_threadpool(drawing.html, recent(request, result_id)))

    return router


def _only(media_type: str) -> dict[int | str, dict[str, Any]]:
    return {200: {"content": {media_type: {}}}}


router = APIRouter()
for _evaluation in EVALUATIONS.values():
    router.include_router(_routes_of(_evaluation))
