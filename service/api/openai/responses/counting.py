"""``POST /v1/responses/input_tokens``: the tokens that the input of a response would be."""

from __future__ import annotations

from fastapi import APIRouter, Request

from service.api.http.routing import Route
from service.api.openai.names import named
from service.api.openai.responses.schemas import InputTokens, InputTokensRequest
from service.api.openai.shortening import text_of, tokenized
from service.api.quotas import admit

router = APIRouter(tags=["openai"], route_class=Route)


@router.post("/v1/responses/input_tokens")
async def count_tokens(body: InputTokensRequest, request: Request) -> InputTokens:
    """Count the tokens of a text or a conversation, with its instructions and tools."""
    body.check()
    name = named(request.app.state.models, body.model, body.pe)
    await admit(request, [])
    prompt = await tokenized(body, request, name.served, await text_of(body, request, name))
    return InputTokens(input_tokens=len(prompt.token_ids))
