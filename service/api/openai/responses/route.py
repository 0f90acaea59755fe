"""The route, and the events of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from service.api.generation.prepared import PreparedPrompt
from service.api.http.routing import Route
from service.api.http.streaming import Emit, event_stream
from service.api.openai.conversation import prepared_conversation
from service.api.openai.names import Named
from service.api.openai.responses.schemas import (
    CachedTokens,
    Incomplete,
    OutputMessage,
    OutputText,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
    Status,
)
from service.engine.generation import Generation

router = APIRouter(tags=["openai"], route_class=Route)


@router.post("/v1/responses", response_model=ResponseObject, responses={200: {"content": {"text/event-stream": {}}}})
async def respond(body: ResponsesRequest, request: Request) -> Response | ResponseObject:
    """Answer a text or a conversation."""
    name, prepared, _ = await prepared_conversation(body, request)
    answer = _Answer(body, name, prepared)
    if body.stream:
        return event_stream(answer.stream, answer.failed)
    return await answer.whole(lambda text: None)


class _Answer:
    """One message of one response."""

    def __init__(self, body: ResponsesRequest, name: Named, prepared: PreparedPrompt) -> None:
        self._body, self._name, self._prepared = body, name.name, prepared
        self._id, self._message_id = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._created, self._text, self._sent = int(time.time()), "", 0

    async def whole(self, on_text: Callable[[str], None]) -> ResponseObject:
        """The response at its end; ``on_text`` gets its text piece by piece."""
        async with aclosing(self._prepared.generate(0, self._body.sampling())) as pieces:
            async for piece in pieces:
                if piece.text:
                    self._text += piece.text
                    on_text(piece.text)
        return self._response("incomplete" if piece.finish_reason == "length" else "completed", piece.generation)

    async def stream(self, emit: Emit) -> None:
        def send(kind: str, **fields: Any) -> None:
            emit({"type": f"response.{kind}", "sequence_number": self._sent, **fields}, f"response.{kind}")
            self._sent += 1

        begun = self._response("in_progress", None).model_dump()
        item = {"output_index": 0}
        part = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        send("created", response=begun)
        send("in_progress", response=begun)
        send("output_item.added", **item, item={**self._message("in_progress").model_dump(), "content": []})
        send("content_part.added", **part, part=OutputText().model_dump())
        end = await self.whole(lambda text: send("output_text.delta", **part, delta=text, logprobs=[]))
        (message,) = end.output
        send("output_text.done", **part, text=self._text, logprobs=[])
        send("content_part.done", **part, part=message.content[0].model_dump())
        send("output_item.done", **item, item=message.model_dump())
        send(end.status, response=end.model_dump())

    def failed(self, body: dict[str, Any]) -> tuple[Any, ...]:
        """The last event of a stream that fails: typed, and with ``error``, which OpenAI's client raises."""
        return {**body["error"], "type": "error", "sequence_number": self._sent, **body}, "error"

    def _message(self, status: Status) -> OutputMessage:
        return OutputMessage(id=self._message_id, status=status, content=[OutputText(text=self._text)])

    def _response(self, status: Status, generation: Generation | None) -> ResponseObject:
        """The response so far; at its end with the ``generation``."""
        body, prepared = self._body, self._prepared
        return ResponseObject(
            id=self._id,
            created_at=self._created,
            status=status,
            incomplete_details=Incomplete() if status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=prepared.max_tokens,
            metadata=body.metadata or {},
            model=self._name,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            prompt_cache_key=body.prompt_cache_key,
            safety_identifier=body.safety_identifier,
            output=[] if generation is None else [self._message(status)],
            temperature=body.temperature,
            text=body.text.echoed(),
            top_p=body.top_p,
            usage=None if generation is None else _usage(len(prepared.prompt.token_ids), generation),
            user=body.user,
            pe=prepared.pe,
            auto=prepared.auto,
        )


def _usage(prompt: int, generation: Generation) -> ResponseUsage:
    new = len(generation.token_ids)
    return ResponseUsage(
        input_tokens=prompt,
        input_tokens_details=CachedTokens(cached_tokens=generation.cached_tokens),
        output_tokens=new,
        total_tokens=prompt + new,
    )
