"""``POST /export``: an encoding in the syntax of another system."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BeforeValidator, ConfigDict, Field

from patches import LONGEST, KnownFields, Method, PositionEncoding, problem
from service.api.http.routing import Route
from service.api.reference.openapi import SAMPLE
from service.api.response_models.encodings import ExportResult
from service.errors import ApiError, bad_request
from service.export.target import Target
from service.export.targets import (
    TARGETS,
    LengthRequired,
    NotExpressible,
    Source,
    TargetName,
    default_length,
    export,
    source_of,
)
from service.models.registry import ModelRegistry, ServedModel
from service.policy.auto import AUTO, is_auto
from service.sharing.workers import Workers

router = APIRouter(tags=["methods"], route_class=Route)

FOLDER = "FOLDER"
"""In a line, the folder of an adapter: a server does not show its paths."""


def _fixed(pe: Any) -> Any:
    if is_auto(pe):
        raise problem("auto", f"{AUTO} chooses by the reserved length and has no fixed encoding to export: choose one")
    return pe


class ExportRequest(KnownFields):
    """An encoding, and the system that is to serve the model with it."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"pe": SAMPLE, "target": next(iter(TARGETS))}]})

    pe: Annotated[PositionEncoding, BeforeValidator(_fixed)] = Field(
        description="A short form such as `yarn:4`, or an object with `method`."
    )
    target: TargetName = Field(description="The system.")
    model: str | None = Field(None, description="A served model; the first one when absent.")
    length: Annotated[int, Field(ge=2, le=LONGEST - 1)] | None = Field(
        None,
        description="Longest text in tokens, new ones included. When absent: the length that the parameters reach, as "
        "factor x trained length. For the checkpoint's own encoding: the length that it declares. Others need one.",
    )


@router.post("/export")
async def export_encoding(body: ExportRequest, request: Request) -> ExportResult:
    """An encoding as configuration and options of another system.

    The answer to an encoding that the system cannot express is 400; its `closest` is one that it can.
    """
    workers: Workers = request.app.state.workers
    return await workers.run(_exported, body, request.app.state.models)


def _exported(body: ExportRequest, models: ModelRegistry) -> ExportResult:
    served = models.for_method(models.get(body.model), body.pe)
    target = TARGETS[body.target]
    source = _source(served, models)
    try:
        length = body.length or _default_length(body.pe.without_follows(), served, source, target)
        pe = served.patch.describe(body.pe, length)
        expression = export(served.patch.confirmed(body.pe, length), source, target, length)
    except NotExpressible as error:
        extra = {"closest": error.closest}
        raise ApiError(400, str(error), param="pe", code="not_expressible", extra=extra) from error
    except LengthRequired as error:
        raise bad_request(str(error), "length") from error
    except ValueError as error:
        raise bad_request(str(error), "pe") from error
    changes = bool(expression.config) or expression.arguments != target.unchanged(length).arguments
    checkpoint, options, notes = _adapter(served, target)
    expression = replace(expression, arguments=[*expression.arguments, *options])
    return ExportResult(
        target=target.name,
        version=target.version,
        documentation=target.documentation,
        model=served.name,
        pe=pe,
        length=length,
        exact=not expression.differences,
        changes=changes,
        config=expression.config,
        arguments=expression.arguments,
        usage=target.usage(checkpoint, expression),
        apply=target.place(expression),
        differences=expression.differences,
        notes=notes,
    )


def _default_length(method: Method, served: ServedModel, source: Source, target: Target) -> int:
    """The length that the parameters of ``method`` reach.

    Raises:
        NotExpressible: where none is needed, since the system cannot carry the encoding within the trained length.
        LengthRequired: for an encoding without such a length.
    """
    try:
        return default_length(method, source.geometry)
    except LengthRequired:
        trained = served.trained_length
        try:
            export(served.patch.confirmed(method, trained), source, target, trained)
        except NotExpressible as error:
            raise error.without_length(trained) from None
        raise


def _adapter(served: ServedModel, target: Target) -> tuple[str, list[str], list[str]]:
    """(checkpoint to load, further options, notes): for an adapter its base, if ``target`` adds adapters to one."""
    if served.base is None:
        return served.name, [], []
    options, note = target.adapter(served.name, FOLDER)
    if options:
        return served.base, options, [note]
    return served.name, [], [f"{served.name} is an adapter: the line is for a checkpoint that has it merged."]


def _source(served: ServedModel, models: ModelRegistry) -> Source:
    """Raises:
    ApiError: 400 for a model that is a part of a larger one.
    """
    source = source_of(served.patch, models.get(served.base).patch if served.base else None)
    if source is None:
        raise bad_request(
            f"model: {served.name} is the language part of a larger model, which no export covers", "model"
        )
    return source
