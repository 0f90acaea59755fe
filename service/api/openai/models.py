"""``GET /v1/models``: what a client may put into ``model``, encodings by alias included."""

from __future__ import annotations

from typing import Literal

import psutil
from fastapi import APIRouter, Request
from pydantic import BaseModel

from service.api.http.routing import Route
from service.api.openai.names import Named, named, presets
from service.models.registry import ModelRegistry

router = APIRouter(tags=["openai"], route_class=Route)


class Model(BaseModel):
    """``root`` is the model whose weights answer; ``parent`` the one that an alias is an encoding of, or the base of an
    adapter."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class Models(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


@router.get("/v1/models")
async def models(request: Request) -> Models:
    """Every served model and the preset encodings of each; any other `<model>@<encoding>` works as well.

    Requests with the header `anthropic-version` get this list and single models in the form of Anthropic's API.
    """
    return Models(data=[_model(entry) for entry in listed(request.app.state.models)])


@router.get("/v1/models/{model_id:path}")
async def model(model_id: str, request: Request) -> Model:
    """One model or alias, listed or not."""
    return _model(named(request.app.state.models, model_id))


def listed(registry: ModelRegistry) -> list[Named]:
    """Every served model, each before its presets."""
    return [entry for served in registry for entry in (named(registry, served.name), *presets(served, registry))]


def created() -> int:
    """The start of the server, in seconds since 1970."""
    return int(psutil.Process().create_time())


def _model(entry: Named) -> Model:
    return Model(
        id=entry.name,
        created=created(),
        owned_by="ropeway",
        root=entry.target.model.name,
        parent=entry.served.name if entry.alias else entry.served.base,
        max_model_len=entry.target.model.max_length,
    )
