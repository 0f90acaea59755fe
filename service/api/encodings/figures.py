"""``POST /figures``: what encodings do on a served model, as figures for a page to draw."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from patches import OWN, KnownFields, Recipe, ResolvedRecipe, examples, label_of, to_shorthand
from service.api.encodings.auto import with_ranges
from service.api.files import RenderedFiles, file_response
from service.api.http.routing import Route
from service.api.response_models.figures import Figures
from service.engine.thread.cpu import end_openmp_threads
from service.errors import bad_request
from service.figures.encodings.vectors import vector_norms
from service.models.registry import ModelRegistry, ServedModel
from service.policy.auto import Encoding
from service.reports.render import encoding_figures_of
from service.reports.rendered import Rendered
from service.sharing.workers import Workers

router = APIRouter(tags=["methods"], route_class=Route)

MOST = 4
"""Encodings in one set of figures."""
TIMES_LONGER = 4
MOST_TOKENS = 1 << 20


class FiguresRequest(KnownFields):
    """Encodings to draw over each other, on one model at one length."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"pe": [to_shorthand(one) for one in examples()]}]})

    pe: Annotated[list[Encoding], Field(min_length=1, max_length=MOST)] = Field(
        description="Encodings: short forms such as `yarn:4`, or objects with `method`."
    )
    model: str | None = Field(None, description="A served model; the first one when absent.")
    length: Annotated[int, Field(ge=2, le=MOST_TOKENS)] | None = Field(
        None, description="Tokens of the text; 4 times the trained length when absent."
    )


class DrawnEncoding(BaseModel):
    """An encoding as it takes effect; ``model`` is the served model whose weights answer under it."""

    label: str
    model: str
    pe: dict[str, Any]


class EncodingFigures(Figures):
    model: str
    trained_length: int
    length: int
    encodings: list[DrawnEncoding]


@router.post("/figures", response_model=EncodingFigures)
async def figures(body: FiguresRequest, request: Request) -> Response:
    """Wavelengths, distances, biases, temperatures, similarity and rotation of encodings, as Plotly figures."""
    models: ModelRegistry = request.app.state.models
    served = models.get(body.model)
    length = body.length or min(TIMES_LONGER * served.trained_length, MOST_TOKENS)
    drawn: dict[str, ResolvedRecipe] = {}
    models_of: dict[str, ServedModel] = {}
    about = []
    for index, chosen in enumerate(await with_ranges(body.pe, served, request)):
        method = chosen.at(length)
        target = models.for_method(served, method)
        try:
            pe = target.patch.describe(chosen, length)
            resolved = target.patch.resolve(method, length)
        except ValueError as error:
            raise bad_request(f"pe.{index}: {error}", f"pe.{index}") from error
        label = label_of(target.patch.confirmed(method, length))
        drawn[label], models_of[label] = resolved, target
        about.append({"label": label, "model": target.name, "pe": pe})
    own = served.patch.resolve(OWN, served.trained_length).inv_freq
    texts = {"model": served.name, "trained_length": served.trained_length, "length": length, "encodings": about}
    files: RenderedFiles = request.app.state.files
    workers: Workers = request.app.state.workers

    async def make() -> Rendered:
        norms = {
            label: await asyncio.to_thread(_norms, models_of[label], one.recipe, length)
            for label, one in drawn.items()
            if one.recipe.relative is not None
        }
        return await workers.render(encoding_figures_of, drawn, (own, served.trained_length, length, norms), texts)

    key = "encodings", json.dumps(texts, sort_keys=True)
    return file_response(await files.get(key, make), request)


def _norms(served: ServedModel, recipe: Recipe, length: int) -> list[list[float]]:
    """The thread is one of many, and stays: it keeps no OpenMP threads."""
    try:
        return vector_norms(served.patch.model, recipe, length)
    finally:
        end_openmp_threads()
