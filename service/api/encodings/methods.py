"""``GET /methods``, ``GET /methods/{name}``, and its frequencies."""

from __future__ import annotations

import json
import math
from functools import cache
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response
from pydantic import BaseModel

from patches import (
    LONGEST,
    METHODS,
    OWN,
    InvalidEncoding,
    Recipe,
    describe_method,
    field_value,
    label_of,
    parse,
    questions,
    unknown_method,
)
from service.api.files import RenderedFiles, file_response, sends
from service.api.http.queries import AnyParameters, WholeNumber
from service.api.http.routing import Route
from service.api.response_models.encodings import FullMethodList, MethodInfo, MethodList, MethodSummary, ParameterInfo
from service.errors import ApiError, bad_request
from service.models.registry import ModelRegistry
from service.reports.render import frequencies_of
from service.reports.rendered import Rendered
from service.reports.schema import type_text
from service.sharing.workers import Workers

router = APIRouter(tags=["methods"], route_class=Route)


Reserved = Annotated[WholeNumber | None, Query(ge=1, le=LONGEST - 1)]


class Pair(BaseModel):
    """One rotary pair, before and after. Wavelengths are in tokens; null means no rotation."""

    pair: int
    inv_freq_before: float
    inv_freq_after: float
    wavelength_before: float | None
    wavelength_after: float | None
    turns_in_trained_length: float


class FrequencyTable(BaseModel):
    model: str
    trained_length: int
    length: int
    pe: dict[str, Any]
    pairs: list[Pair]


@router.get("/methods", response_model=MethodList | FullMethodList)
async def methods(
    full: Annotated[bool, Query(description="With evidence, papers, costs and JSON schemas: some 700 kB.")] = False,
) -> Response:
    """Every positional encoding that a request can choose."""
    return Response(await run_in_threadpool(_listed, full), media_type="application/json")


@router.get("/methods/{name}")
async def method(name: str) -> MethodInfo:
    """One positional encoding in full, with the JSON schema of its parameters."""
    _check_known(name)
    return await run_in_threadpool(_in_full, name)


@router.get("/methods/{name}/frequencies")
async def frequencies(
    name: str,
    request: Request,
    given: AnyParameters,
    model: str | None = None,
    length: Reserved = None,
) -> FrequencyTable:
    """Rotary frequencies before and after. The method's parameters are further query parameters."""
    return _resolved(name, request, given, model, length)[0]


@router.get("/methods/{name}/frequencies.png", **sends("image/png"))
async def frequencies_png(
    name: str,
    request: Request,
    given: AnyParameters,
    model: str | None = None,
    length: Reserved = None,
) -> Response:
    """Rotary frequencies as a picture: wavelengths before and after, and the stretch of each pair.

    A bias replaces the stretch in the picture. An encoding that only moves positions is drawn as its distances.
    """
    table, label, recipe = _resolved(name, request, given, model, length)
    title = f"{label} on {table.model}"
    pairs = [pair.model_dump() for pair in table.pairs]
    files: RenderedFiles = request.app.state.files
    workers: Workers = request.app.state.workers

    async def make() -> Rendered:
        return await workers.render(frequencies_of, pairs, table.trained_length, title, recipe, table.length)

    key = "frequencies", table.model, table.length, json.dumps(table.pe, sort_keys=True)
    return file_response(await files.get(key, make), request)


def _check_known(name: str) -> None:
    if name not in METHODS:
        raise ApiError(404, unknown_method(name), param="name", code="not_found")


@cache
def _listed(full: bool) -> bytes:
    if full:
        return FullMethodList(methods=[_in_full(name) for name in METHODS]).model_dump_json().encode()
    return MethodList(methods=[_in_short(name) for name in METHODS]).model_dump_json().encode()


@cache
def _in_full(name: str) -> MethodInfo:
    from service.figures.encodings.samples import sample  # figures load with the first one

    return MethodInfo(kind=sample(name).group, **describe_method(name))


def _in_short(name: str) -> MethodSummary:
    info = _in_full(name)
    required, fields = info.parameters.get("required", []), info.parameters["properties"]
    own = METHODS[name].__annotations__  # its own parameters before those that it shares with others
    parameters = [
        ParameterInfo(name=key, type=type_text(field), required=key in required, default=field.get("default"))
        for key, field in sorted(fields.items(), key=lambda item: item[0] not in own)
        if key != "method"
    ]
    about = {"kind": info.kind, "family": info.family, "summary": info.summary, "questions": questions(name)}
    return MethodSummary(method=name, parameters=parameters, **about)


def _resolved(
    name: str, request: Request, given: dict[str, str], model: str | None, length: int | None
) -> tuple[FrequencyTable, str, Recipe]:
    """The table of frequencies, the method's label, and the recipe with its numbers for the length.

    Raises:
        ApiError: 404 for an unknown method, 400 for parameters that do not fit it or the model.
    """
    _check_known(name)
    if "method" in given:
        raise bad_request("method: the path names it; leave it out", "method")
    models: ModelRegistry = request.app.state.models
    served = models.get(model)
    length = length or served.trained_length
    own = {key: text for key, text in given.items() if key not in ("model", "length")}
    try:
        method = parse({"method": name, **{key: field_value(METHODS[name], key, own[key]) for key in own}})
        resolved = served.patch.resolve(method, length)
        before = served.patch.resolve(OWN, served.trained_length)
    except InvalidEncoding:
        raise
    except ValueError as error:
        raise bad_request(str(error), _at_fault(name, str(error), own)) from error
    plain = before.inv_freq or (0.0,) * (served.patch.geometry.rotary_dim // 2)
    after = resolved.inv_freq or (0.0,) * len(plain)
    table = FrequencyTable(
        model=served.name,
        trained_length=served.trained_length,
        length=length,
        pe=served.patch.describe(method, length),
        pairs=[_pair(i, *both, served.trained_length) for i, both in enumerate(zip(plain, after, strict=True))],
    )
    return table, label_of(method), resolved.recipe


def _at_fault(name: str, message: str, own: dict[str, str]) -> str:
    """The query parameter that ``message`` opens with. A field of the schedule underneath came in ``base``."""
    field = message.partition(":")[0]
    if field in own or (field in METHODS[name].model_fields and field != "method"):
        return field
    return "base" if "base" in own else "name"


def _pair(index: int, before: float, after: float, trained_length: int) -> Pair:
    return Pair(
        pair=index,
        inv_freq_before=before,
        inv_freq_after=after,
        wavelength_before=2 * math.pi / before if before else None,
        wavelength_after=2 * math.pi / after if after else None,
        turns_in_trained_length=trained_length * after / (2 * math.pi),
    )
