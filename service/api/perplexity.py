"""``POST /perplexity``: perplexity against context length, and the same result as table and picture."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import OrderedDict
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from service import context
from service.api.admission import admit, charge, log_prompts, set_deadline, upper_bound
from service.api.streaming import ClientGone, Emit, event_stream, unless_disconnected
from service.engine.admission import Ticket
from service.errors import ApiError
from service.evaluation.documents import BUILT_IN
from service.evaluation.perplexity import Plan, Subject, evaluate
from service.evaluation.planning import plan_of
from service.evaluation.plots import perplexity_html, perplexity_png
from service.evaluation.request import PerplexityRequest, example
from service.evaluation.results import MethodResult, PerplexityResult, Progress
from service.evaluation.tables import perplexity_csv
from service.inputs import as_list
from service.models.registry import ModelRegistry
from service.settings import Settings

router = APIRouter(tags=["perplexity"])


class RecentResults:
    """The last results, so that a picture is one request away. Each belongs to the API key that made it: to
    others it does not exist."""

    def __init__(self, most: int = 128) -> None:
        self._most = most
        self._results: OrderedDict[tuple[str, str], PerplexityResult] = OrderedDict()

    def add(self, result: PerplexityResult) -> PerplexityResult:
        """Keep ``result`` for the current tenant and put its links into it."""
        result.links = {
            name: f"/perplexity/{result.id}/{file}"
            for name, file in (("csv", "table.csv"), ("png", "plot.png"), ("html", "plot.html"))
        }
        self._results[context.current().tenant, result.id] = result
        while len(self._results) > self._most:
            self._results.popitem(last=False)
        return result

    def get(self, result_id: str) -> PerplexityResult:
        """The current tenant's result.

        Raises:
            ApiError: 404 when there is none.
        """
        result = self._results.get((context.current().tenant, result_id))
        if result is None:
            raise ApiError(404, "no such result: the server keeps the most recent ones only", code="not_found")
        return result


@router.post(
    "/perplexity",
    response_model=PerplexityResult,
    responses={200: {"content": {"text/csv": {}, "text/event-stream": {}}}},
)
async def perplexity(
    body: Annotated[PerplexityRequest, Body(openapi_examples={"demo": {"value": example()}})], request: Request
) -> Any:
    """Score documents under several encodings at several context lengths."""
    state = request.app.state
    models: ModelRegistry = state.models
    tickets = await _admit(body, models, request)
    plan, subjects = await run_in_threadpool(plan_of, body, models, state.settings)
    await charge(request, sum(subject.tokens for subject in subjects))

    if body.stream:

        async def stream(emit: Emit) -> None:
            result = await _run(plan, subjects, models, tickets, lambda p: emit(p.model_dump_json(), "progress"))
            emit(state.results.add(result).model_dump_json(), "result")

        return event_stream(stream)
    try:
        work = _run(plan, subjects, models, tickets, lambda progress: None)
        result = state.results.add(await unless_disconnected(request, work))
    except ClientGone:
        return JSONResponse(None, status_code=499)
    if "text/csv" in request.headers.get("accept", ""):
        return Response(perplexity_csv(result), media_type="text/csv")
    return result


async def _admit(body: PerplexityRequest, models: ModelRegistry, request: Request) -> dict[str, Ticket]:
    """A place for every model that the evaluation touches, before a document is tokenized."""
    settings: Settings = request.app.state.settings
    set_deadline(body.timeout_s, settings)
    served = models.get(body.model)
    targets = {target.name: target for target in (models.for_method(served, method) for method in body.methods)}
    documents, lengths = as_list(body.input), body.length_values()
    wanted = []
    for target in targets.values():
        capacity = target.engine.scores.capacity
        named = any(isinstance(item, str) and item in BUILT_IN for item in documents)
        longest = capacity if named else max(upper_bound(item, capacity) for item in documents)
        wanted.append((target.engine.scores, min(longest, lengths[-1]) if lengths else longest))
    tickets = await admit(request, wanted)
    log_prompts(request, documents)
    return dict(zip(targets, tickets, strict=True))


async def _run(
    plan: Plan, subjects: list[Subject], models: ModelRegistry, tickets: dict[str, Ticket], on_progress: Any
) -> PerplexityResult:
    """Run the whole evaluation, one generation thread per model that it touches."""
    parts: dict[str, list[int]] = {}
    for index, subject in enumerate(subjects):
        parts.setdefault(subject.model, []).append(index)
    total = sum(subject.tokens for subject in subjects)
    done, seconds = 0, 0.0
    methods: dict[int, MethodResult] = {}
    for name, indices in parts.items():

        def report(progress: Progress, done: int = done, seconds: float = seconds) -> None:
            progress.tokens_done += done
            progress.tokens_total = total
            progress.seconds += seconds
            on_progress(progress)

        part = [subjects[index] for index in indices]
        engine, work = models.get(name).engine, evaluate(plan, part)
        result: PerplexityResult = await engine.run(work, plan.lengths[-1], report, ticket=tickets.get(name))
        for subject in part:
            engine.metrics.scored(subject.method.method, subject.tokens)
        done += sum(subject.tokens for subject in part)
        seconds += result.seconds
        methods.update(zip(indices, result.methods, strict=True))
    return result.model_copy(update={"methods": [methods[i] for i in range(len(subjects))], "seconds": seconds})


@router.get("/perplexity/{result_id}", response_model=PerplexityResult)
async def recent(result_id: str, request: Request) -> PerplexityResult:
    """A recent result again."""
    results: RecentResults = request.app.state.results
    return results.get(result_id)


@router.get(
    "/perplexity/{result_id}/table.csv", response_class=Response, responses={200: {"content": {"text/csv": {}}}}
)
async def table(result_id: str, request: Request) -> Response:
    """One row per method and length."""
    return Response(perplexity_csv(request.app.state.results.get(result_id)), media_type="text/csv")


@router.get(
    "/perplexity/{result_id}/plot.png", response_class=Response, responses={200: {"content": {"image/png": {}}}}
)
async def plot_png(result_id: str, request: Request) -> Response:
    """Perplexity against length as a picture."""
    png = await run_in_threadpool(perplexity_png, request.app.state.results.get(result_id))
    return Response(png, media_type="image/png")


@router.get(
    "/perplexity/{result_id}/plot.html", response_class=Response, responses={200: {"content": {"text/html": {}}}}
)
async def plot_html(result_id: str, request: Request) -> Response:
    """Perplexity against length as an interactive page without outside resources."""
    html = await run_in_threadpool(perplexity_html, request.app.state.results.get(result_id))
    return Response(html, media_type="text/html", headers={"Content-Security-Policy": page_csp(html)})


def page_csp(page: str) -> str:
    """Allows the page's own scripts, by their hashes, and no others; nothing is loaded and nobody may frame it.
    Styles stay open because Plotly writes them into the page as it draws."""
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL)
    hashes = {base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts}
    allowed = " ".join(f"'sha256-{value}'" for value in sorted(hashes))
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
