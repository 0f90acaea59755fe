"""``GET /v1/models`` in Anthropic's form, for requests with the header of its clients. Others get OpenAI's."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.routing import Match
from starlette.types import Scope
from typing_extensions import override

from service.anthropic_failures import is_from_client
from service.api.http.queries import WholeNumber
from service.api.http.routing import Route
from service.api.openai.models import created, listed
from service.api.openai.names import Named, named
from service.errors import bad_request
from service.settings import Settings


class ClientRoute(Route):
    """A route of Anthropic's clients alone: other requests go on to the next one of its path."""

    @override
    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return super().matches(scope) if is_from_client(Headers(scope=scope)) else (Match.NONE, {})


# The document has one operation per path and verb, which is OpenAI's.
router = APIRouter(tags=["anthropic"], route_class=ClientRoute, include_in_schema=False)

STAGES = frozenset({"active", "deprecated", "retired"})
"""Values of the query parameter ``lifecycle``, which clients send with brackets."""


class ModelObject(BaseModel):
    """``max_input_tokens`` counts prompt and answer together, and ``max_tokens`` the answer."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: datetime
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int


class ModelPage(BaseModel):
    """``has_more`` is about the direction of the page."""

    data: list[ModelObject]
    has_more: bool
    first_id: str | None
    last_id: str | None


@router.get("/v1/models")
async def models(
    request: Request,
    limit: Annotated[WholeNumber, Query(ge=1, le=1000)] = 20,
    before_id: str | None = None,
    after_id: str | None = None,
) -> ModelPage:
    """Served models and the preset encodings of each, from one end or beside a model. All of them are active."""
    if before_id is not None and after_id is not None:
        raise bad_request("after_id: not with before_id", "after_id")
    stages = request.query_params.getlist("lifecycle[]")
    if not STAGES.issuperset(stages):
        raise bad_request("lifecycle: must be 'active', 'deprecated' or 'retired'", "lifecycle")
    entries = listed(request.app.state.models) if "active" in stages or not stages else []
    places = {entry.name: place for place, entry in enumerate(entries)}
    if before_id is not None:
        end = _place("before_id", before_id, places)
        start = max(0, end - limit)
    else:
        start = 0 if after_id is None else _place("after_id", after_id, places) + 1
        end = min(start + limit, len(entries))
    data = [_object(entry, request) for entry in entries[start:end]]
    has_more = end < len(entries) if before_id is None else start > 0
    first_id, last_id = (data[0].id, data[-1].id) if data else (None, None)
    return ModelPage(data=data, has_more=has_more, first_id=first_id, last_id=last_id)


@router.get("/v1/models/{model_id:path}")
async def model(model_id: str, request: Request) -> ModelObject:
    """One model or alias, listed or not."""
    return _object(named(request.app.state.models, model_id), request)


def _place(param: str, name: str, places: dict[str, int]) -> int:
    if name not in places:
        raise bad_request(f"{param}: must be the id of a model in the list", param)
    return places[name]


def _object(entry: Named, request: Request) -> ModelObject:
    settings: Settings = request.app.state.settings
    most = entry.target.model.max_length
    return ModelObject(
        id=entry.name,
        display_name=entry.name,
        created_at=datetime.fromtimestamp(created(), UTC),
        max_input_tokens=most,
        max_tokens=min(settings.max_new_tokens, most),
    )
