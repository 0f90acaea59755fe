"""One route per evaluation, and its result again as table and picture."""

import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any

import structlog
from fastapi import APIRouter, Body, Request
from fastapi.responses import Response

from service import context
from service.api.encodings.auto import with_methods
from service.api.files import PictureName, Standalone, result_file, sends, unpacked_response
from service.api.http.routing import DocumentsRoute
from service.api.http.streaming import Emit, event_stream
from service.api.jobs.submission import IdempotencyKey, submit
from service.api.quotas import Reserved, admit, log_prompts, set_deadline, upper_bound
from service.api.store import store_of, stored
from service.errors import ApiError, bad_request
from service.evaluation.catalogue import EVALUATIONS, Evaluation, plan_of
from service.evaluation.documents import BUILT_IN
from service.evaluation.request import EvaluationRequest
from service.evaluation.results import EvaluationResult, Progress
from service.evaluation.scoring.pass_memory import held_tokens
from service.evaluation.setup import setup_of
from service.evaluation.unit import Outcome, Plan, run_units
from service.jobs.database.opening import StoreOutOfReach
from service.jobs.records import JobInfo
from service.jobs.storage.results import Packed, written_and_packed
from service.models.registry import ModelRegistry
from service.reports.rendered import PAGE, PageOptions
from service.settings import Settings
from service.sharing.admission import Ticket
from service.sharing.workers import Workers

log = structlog.get_logger()

WEIGHT = re.compile(r"q=([01](?:\.\d{0,3})?)")

KINDS = ("application/json", "text/csv", "text/event-stream")
"""Media types that an evaluation's route answers with."""


async def answer(body: EvaluationRequest, request: Request, key: str | None) -> Any:
    """Run one evaluation for one request, or queue it under the idempotency key ``key``."""
    if body.background:
        return await submit(body, request, key)
    as_csv = _is_for_csv(",".join(request.headers.getlist("accept")), stream=body.stream)
    if key is not None:
        message = "Idempotency-Key: names a job: send it with background, or to /jobs; here nothing is kept under it"
        raise bad_request(message, "Idempotency-Key")
    if "reuse" in body.model_fields_set:
        raise bad_request("reuse is for jobs: send it with background, or to /jobs; here all is measured", "reuse")
    state = request.app.state
    models: ModelRegistry = state.models
    body = await with_methods(body, request)
    tickets = await _admit(body, models, request)
    plan = await state.workers.run(plan_of, body, models, state.settings.at_once())
    reserved = Reserved(request)
    await reserved.charge(0, plan.tokens)

    if body.stream:

        async def stream(emit: Emit) -> None:
            told = _counted(reserved, lambda progress: emit(progress.model_dump_json(), "progress"))
            result = await _run(plan, models, tickets, state.workers, told)
            written, _ = await _kept(result, request)
            emit(written, "result")

        return event_stream(stream)
    result = await _run(plan, models, tickets, state.workers, _counted(reserved))
    written, packed = await _kept(result, request)
    if as_csv:
        return await result_file("csv", result.id, packed, request)
    return Response(written, media_type="application/json")


def _is_for_csv(accept: str, *, stream: bool) -> bool:
    """True if the header ``accept`` asks for CSV rather than JSON. Of equal weights, CSV comes only by its own name.

    Raises:
        ApiError: when such an answer is to ``stream``, which the header does not accept; 406 when it accepts no type.
    """
    weights = _weights(accept) or {"*/*": 1.0}
    as_json, as_csv, as_stream = (_weight_of(kind, weights) for kind in KINDS)
    if not any((as_json, as_csv, as_stream)):
        message = "Accept: answers are application/json, text/csv, or text/event-stream with stream"
        raise ApiError(406, f"{message}; `links` of the JSON lead to a picture and a page", code="not_acceptable")
    is_for_csv = as_csv > as_json or ("text/csv" in weights and as_csv == as_json)
    if stream and is_for_csv and as_csv > as_stream:
        raise bad_request("stream: must be false with Accept: text/csv, or accept text/event-stream", "stream")
    return is_for_csv


def _weight_of(kind: str, weights: dict[str, float]) -> float:
    """The weight of the most specific range that has ``kind``; 0 without one."""
    ranges = (kind, f"{kind.split('/')[0]}/*", "*/*")
    return next((weights[each] for each in ranges if each in weights), 0.0)


def _weights(accept: str) -> dict[str, float]:
    """The media ranges in ``accept`` and their weights (RFC 9110, section 12.5.1)."""
    found: dict[str, float] = {}
    for part in accept.lower().split(","):
        name, *parameters = map(str.strip, part.split(";"))
        weights = [match for each in parameters if (match := WEIGHT.fullmatch(each))]
        found.setdefault(name, float(weights[0][1]) if weights else 1.0)
    found.pop("", None)
    return found


async def _kept(result: EvaluationResult, request: Request) -> tuple[str, Packed]:
    """The result as JSON, plain and packed, with links to its files.

    A database out of reach leaves the result without links.
    """
    state = request.app.state
    settings: Settings = state.settings
    result.id = context.new_id()
    result.links = {
        name: f"/{result.evaluation}/{result.id}/{file}"
        for name, file in (("csv", "table.csv"), ("png", "plot.png"), ("svg", "plot.svg"), ("html", "plot.html"))
    }
    written, packed = await state.workers.run(written_and_packed, result)
    limits = {"most": settings.recent_results, "most_bytes": settings.recent_results_bytes}
    tenant = context.current().tenant
    try:
        await stored(request, store_of(request).put_result, tenant, result.id, packed, **limits)
    except StoreOutOfReach as error:
        log.warning("result_not_kept", error=str(error))
        result.links = {}
        written, packed = await state.workers.run(written_and_packed, result)
    return written, packed


async def _admit(body: EvaluationRequest, models: ModelRegistry, request: Request) -> dict[str, Ticket]:
    """A place for every model that the evaluation touches, before a document is tokenized."""
    settings: Settings = request.app.state.settings
    set_deadline(body.timeout_s, settings)
    served = models.get(body.model)
    targets = {target.name: target for target in (models.for_method(served, method) for method in body.methods)}
    texts, lengths = body.texts(), body.length_values()
    wanted = []
    for target in targets.values():
        capacity = target.engine.scores.most
        unknown = not texts or any(isinstance(item, str) and item in BUILT_IN for item in texts)
        longest = capacity if unknown else max(upper_bound(item, capacity) for item in texts)
        longest = min(longest, getattr(body, "max_tokens", None) or capacity)
        wanted.append((target.engine.scores, min(longest, lengths[-1]) if lengths else longest))
    tickets = await admit(request, wanted)
    log_prompts(request, texts)
    return dict(zip(targets, tickets, strict=True))


def _counted(
    reserved: Reserved, on_progress: Callable[[Progress], None] = lambda progress: None
) -> Callable[[Progress], None]:
    """``on_progress``, before which the tokens that were read count as used."""
    charged = reserved.tokens

    def report(progress: Progress) -> None:
        reserved.tokens = charged - progress.tokens_done
        on_progress(progress)

    return report


async def _run(
    plan: Plan,
    models: ModelRegistry,
    tickets: dict[str, Ticket],
    workers: Workers,
    on_progress: Callable[[Progress], None],
) -> EvaluationResult:
    """Run the whole plan, stage by stage."""
    began = time.perf_counter()
    outcomes: list[Outcome] = []
    extended: Plan | None = plan
    while extended is not None:
        plan = extended
        outcomes += await _run_stage(plan, len(outcomes), models, tickets, on_progress, began)
        extended = await workers.run(plan.extended, outcomes) if plan.in_stages else None
    result = await workers.run(plan.result, outcomes)
    result.seconds = time.perf_counter() - began
    result.setup = await workers.run(setup_of, result.models(), models)
    return result


def alone(tickets: dict[str, Ticket], model: str) -> Ticket | None:
    """The ticket of a model, taken out. If it waits, or there is none yet, the others are given back.

    Two requests, each with the memory of one model, would wait for that of the other.
    """
    ticket = tickets.pop(model, None)
    if ticket is None or not ticket.granted.is_set():
        while tickets:
            tickets.popitem()[1].leave()
    return ticket


async def _run_stage(
    plan: Plan,
    first: int,
    models: ModelRegistry,
    tickets: dict[str, Ticket],
    on_progress: Callable[[Progress], None],
    began: float,
) -> list[Outcome]:
    """Run the units from ``first`` on, one generation thread after another for the models that they touch."""
    parts: dict[str, list[int]] = {}
    for index, unit in enumerate(plan.units[first:], first):
        parts.setdefault(unit.subject.model, []).append(index)
    done = sum(unit.tokens for unit in plan.units[:first])
    measured: dict[int, Outcome] = {}
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

        units, served = [plan.units[index] for index in indices], models.get(name)
        held, scored = max(held_tokens(unit, served.score_chunk) for unit in units), Counter[str]()
        for unit in units:
            scored[unit.method.method] += unit.tokens
        part: list[Outcome] = await served.engine.score(
            run_units(units), held, report, scored=scored, ticket=alone(tickets, name)
        )
        done += sum(unit.tokens for unit in units)
        measured.update(zip(indices, part, strict=True))
    return [measured[index] for index in range(first, len(plan.units))]


def _routes_of(evaluation: Evaluation) -> APIRouter:
    """POST to measure; GET the recent result again, as JSON, table and picture."""
    router = APIRouter(prefix=f"/{evaluation.name}", tags=[evaluation.name], route_class=DocumentsRoute)
    example = {"demo": {"value": evaluation.request.example()}}
    in_other_forms: dict[int | str, dict[str, Any]] = {
        200: {"content": {"text/csv": {}, "text/event-stream": {}}},
        202: {"model": JobInfo, "description": "With `background`: the job that it has become."},
    }

    async def recent(request: Request, result_id: str) -> Packed:
        found = await stored(request, store_of(request).find_result, context.current().tenant, result_id)
        if found is None or found.evaluation != evaluation.name:
            raise ApiError(404, "no such result: the server keeps the most recent ones only", code="not_found")
        return found

    async def file(form: str, request: Request, result_id: str, options: PageOptions = PAGE) -> Response:
        return await result_file(form, result_id, await recent(request, result_id), request, options=options)

    @router.post(
        "", response_model=evaluation.result, responses=in_other_forms, summary=evaluation.summary, name=evaluation.name
    )
    async def measure(
        body: Annotated[evaluation.request, Body(openapi_examples=example)],  # type: ignore[name-defined]
        request: Request,
        idempotency_key: IdempotencyKey = None,
    ) -> Any:
        return await answer(body, request, idempotency_key)

    @router.get("/{result_id}", response_model=evaluation.result, summary="A recent result again.")
    async def again(result_id: str, request: Request) -> Response:
        return unpacked_response((await recent(request, result_id)).data, "application/json", request, {})

    @router.get("/{result_id}/table.csv", **sends("text/csv"))
    async def table(result_id: str, request: Request) -> Response:
        """Every number as a long table."""
        return await file("csv", request, result_id)

    @router.get("/{result_id}/plot.png", **sends("image/png"))
    async def plot_png(result_id: str, request: Request, picture: PictureName = None) -> Response:
        """The result as a picture."""
        return await file("png", request, result_id, PageOptions(picture=picture))

    @router.get("/{result_id}/plot.svg", **sends("image/svg+xml"))
    async def plot_svg(result_id: str, request: Request, picture: PictureName = None) -> Response:
        """The same as vectors, for papers."""
        return await file("svg", request, result_id, PageOptions(picture=picture))

    @router.get("/{result_id}/plot.html", **sends("text/html"))
    async def plot_html(
        result_id: str, request: Request, standalone: Standalone = False, picture: PictureName = None
    ) -> Response:
        """The result as an interactive page; it loads Plotly's script from this server unless it is standalone."""
        return await file("html", request, result_id, PageOptions(standalone, picture=picture))

    return router


ROUTERS = tuple(map(_routes_of, EVALUATIONS.values()))
