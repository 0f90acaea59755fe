"""The route: a response as a whole, or as a stream of typed events."""

from __future__ import annotations

import time
import uuid
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from service.api.generation.token_names import TokenNames
from service.api.http.routing import Route
from service.api.http.streaming import Emit, event_stream
from service.api.openai import logprobs
from service.api.openai.answers import ChatToken
from service.api.openai.conversation import Conversation, Part, prepared_conversation
from service.api.openai.responses.items import OutputItem, Status
from service.api.openai.responses.logprobs import TextTokens
from service.api.openai.responses.output import Items, Send
from service.api.openai.responses.schemas import (
    CachedTokens,
    Incomplete,
    ReasoningTokens,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
)
from service.api.openai.tools.reading import PlainReader
from service.api.openai.usage import TokensUsed
from service.engine.generation import Generation
from service.errors import ApiError, body_of

router = APIRouter(tags=["openai"], route_class=Route)


@router.post("/v1/responses", response_model=ResponseObject, responses={200: {"content": {"text/event-stream": {}}}})
async def respond(body: ResponsesRequest, request: Request) -> Response | ResponseObject:
    """Answer a text or a conversation."""
    body.check()
    answer = _Answer(body, await prepared_conversation(body, request))
    if body.stream:
        return event_stream(answer.stream, answer.failed)
    return await answer.whole()


class _Answer:
    """The items of one response."""

    def __init__(self, body: ResponsesRequest, conversation: Conversation) -> None:
        self._body, self._conversation = body, conversation
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._names = TokenNames(conversation.name.served.tokenizer)
        self._tokens = TextTokens()
        self._sent = self._reasoning = 0

    async def whole(self, send: Send = lambda kind, **fields: None) -> ResponseObject:
        """The response at its end; ``send`` gets the events of its items."""
        items, sampling = Items(send), self._body.sampling(0, self._body.alternatives)
        if isinstance(self._conversation.readers[0], PlainReader):
            items.open_message()
        async with aclosing(self._conversation.parts(0, sampling)) as parts:
            async for part in parts:
                items.add(part.said, self._logprobs(part))
                self._reasoning = part.reasoning
        status: Status = "incomplete" if part.finish_reason == "length" else "completed"
        return self._response(status, items.closed(status), part.piece.generation)

    def _logprobs(self, part: Part) -> list[ChatToken]:
        if self._body.alternatives is None:
            return []
        tokens = self._tokens.take(part.piece, part.said.text, self._conversation.readers[0].behind)
        return logprobs.chat(tokens, self._names).content

    async def stream(self, emit: Emit) -> None:
        def send(kind: str, **fields: Any) -> None:
            emit({"type": f"response.{kind}", "sequence_number": self._sent, **fields}, f"response.{kind}")
            self._sent += 1

        begun = self._response("in_progress", [], None).model_dump()
        send("created", response=begun)
        send("in_progress", response=begun)
        end = await self.whole(send)
        send(end.status, response=end.model_dump())

    def failed(self, error: ApiError) -> tuple[Any, ...]:
        """The last event of a stream that fails: typed, and with ``error``, which OpenAI's client raises."""
        body = body_of(error)
        return {**body["error"], "type": "error", "sequence_number": self._sent, **body}, "error"

    def _response(self, status: Status, output: list[OutputItem], generation: Generation | None) -> ResponseObject:
        """The response so far; at its end with the ``generation``."""
        body, prepared = self._body, self._conversation.prepared
        choice = body.tool_choice or "auto"
        return ResponseObject(
            id=self._id,
            created_at=self._created,
            status=status,
            incomplete_details=Incomplete() if status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=prepared.max_tokens,
            metadata=body.metadata or {},
            model=self._conversation.name.name,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            prompt_cache_key=body.prompt_cache_key,
            reasoning={"effort": body.reasoning.effort, "summary": None},
            safety_identifier=body.safety_identifier,
            output=output,
            temperature=body.temperature,
            text=body.text.echoed(),
            tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
            tools=[tool.model_dump() for tool in body.tools or []],
            top_logprobs=body.top_logprobs or 0,
            top_p=body.top_p,
            truncation=body.truncation,
            usage=None if generation is None else self._usage(generation),
            user=body.user,
            pe=prepared.pe,
            auto=prepared.auto,
        )

    def _usage(self, generation: Generation) -> ResponseUsage:
        used = TokensUsed([self._conversation.prepared]).so_far(generation)
        return ResponseUsage(
            input_tokens=used.prompt_tokens,
            input_tokens_details=CachedTokens(cached_tokens=used.prompt_tokens_details.cached_tokens),
            output_tokens=used.completion_tokens,
            output_tokens_details=ReasoningTokens(reasoning_tokens=self._reasoning),
            total_tokens=used.total_tokens,
        )
