"""``POST /v1/messages/count_tokens``: the tokens that a conversation would be."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool

from service.api.anthropic.answers import Count
from service.api.anthropic.schemas import CountRequest
from service.api.generation.prompts import prompts_of
from service.api.http.routing import Route
from service.api.openai.names import named
from service.api.quotas import admit

router = APIRouter(tags=["anthropic"], route_class=Route)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountRequest, request: Request) -> Count:
    """Count the tokens of a conversation with its tools."""
    served = named(request.app.state.models, body.model, body.pe).served
    await admit(request, [])
    text = await run_in_threadpool(body.written, served)
    special = body.special_tokens(served)
    (prompt,) = await prompts_of(request, [text], served, body.PARAM, add_special_tokens=special)
    return Count(input_tokens=len(prompt.token_ids))
