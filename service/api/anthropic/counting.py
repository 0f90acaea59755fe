"""``POST /v1/messages/count_tokens``: the tokens that a conversation would be."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool

from service.api.anthropic.answers import Count
from service.api.anthropic.schemas import CountRequest
from service.api.http.routing import Route
from service.api.openai.names import named
from service.api.openai.shortening import tokenized
from service.api.quotas import admit

router = APIRouter(tags=["anthropic"], route_class=Route)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountRequest, request: Request) -> Count:
    """Count the tokens of a conversation with its tools."""
    served = named(request.app.state.models, body.model, body.pe).served
    await admit(request, [])
    prompt = await tokenized(body, request, served, await run_in_threadpool(body.written, served))
    return Count(input_tokens=len(prompt.token_ids))
