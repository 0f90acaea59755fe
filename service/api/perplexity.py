"""``POST /perplexity``: perplexity against context length, and the same result as table and picture."""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from service.api.streaming import ClientGone, Emit, event_stream, unless_disconnected
from service.errors import ApiError
from service.evaluation.perplexity import Plan, Subject, evaluate
from service.evaluation.planning import plan_of
from service.evaluation.plots import perplexity_html, perplexity_png
from service.evaluation.request import PerplexityRequest, example
from service.evaluation.results import MethodResult, PerplexityResult, Progress
from service.evaluation.tables import perplexity_csv
from service.models.registry import ModelRegistry

router = APIRouter(tags=["perplexity"])


class RecentResults:
    """The last results, by an id that cannot be guessed, so that a picture is one request away."""

    def __init__(self, most: int = 128) -> None:
        self._most = most
        self._results: OrderedDict[str, PerplexityResult] = OrderedDict()

    def add(self, result: PerplexityResult) -> PerplexityResult:
        """Keep ``result`` and put its links into it."""
        result.links = {
            name: f"/perplexity/{result.id}/{file}"
            for name, file in (("csv", "table.csv"), ("png", "plot.png"), ("html", "plot.html"))
        }
        self._results[result.id] = result
        while len(self._results) > self._most:
            self._results.popitem(last=False)
        return result

    def get(self, result_id: str) -> PerplexityResult:
        if result_id not in self._results:
            raise ApiError(404, "no such result: the server keeps the most recent ones only", code="not_found")
        return self._results[result_id]


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
    models.get(body.model)  # before tokenizing: an unknown model costs nothing
    plan, subjects = await run_in_threadpool(plan_of, body, models, state.settings)

    if body.stream:

        async def stream(emit: Emit) -> None:
            result = await _run(plan, subjects, models, lambda p: emit(p.model_dump_json(), "progress"))
            emit(state.results.add(result).model_dump_json(), "result")

        return event_stream(stream)
    try:
        work = _run(plan, subjects, models, lambda progress: None)
        result = state.results.add(await unless_disconnected(request, work))
    except ClientGone:
        return JSONResponse(None, status_code=499)
    if "text/csv" in request.headers.get("accept", ""):
        return Response(perplexity_csv(result), media_type="text/csv")
    return result


async def _run(plan: Plan, subjects: list[Subject], models: ModelRegistry, on_progress: Any) -> PerplexityResult:
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
        result: PerplexityResult = await models.get(name).engine.run(evaluate(plan, part), plan.lengths[-1], report)
        done += sum(subject.tokens for subject in part)
        seconds += result.seconds
        methods.update(zip(indices, result.methods, strict=True))
    return result.model_copy(update={"methods": [methods[i] for i in range(len(subjects))], "seconds": seconds})


@router.get("/perplexity/{result_id}", response_model=PerplexityResult)
async def recent(result_id: str, request: Request) -> PerplexityResult:
    """A recent result again."""
    results: RecentResults = request.app.state.results
    return results.get(result_id)


@router.get("/perplexity/{result_id}/table.csv", response_class=Response)
async def table(result_id: str, request: Request) -> Response:
    """One row per method and length."""
    return Response(perplexity_csv(request.app.state.results.get(result_id)), media_type="text/csv")


@router.get("/perplexity/{result_id}/plot.png", response_class=Response)
async def plot_png(result_id: str, request: Request) -> Response:
    """Perplexity against length as a picture."""
    png = await run_in_threadpool(perplexity_png, request.app.state.results.get(result_id))
    return Response(png, media_type="image/png")


@router.get("/perplexity/{result_id}/plot.html", response_class=Response)
async def plot_html(result_id: str, request: Request) -> Response:
    """Perplexity against length as an interactive page without outside resources."""
    html = await run_in_threadpool(perplexity_html, request.app.state.results.get(result_id))
    return Response(html, media_type="text/html")
