"""``POST /v1/messages``: a message as a whole, or as a stream of typed events."""

from __future__ import annotations

import uuid
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from service.anthropic_failures import event_of
from service.api.anthropic.answers import AnswerBlock, MessageObject, MessagesUsage, StopReason, stop_reason_of
from service.api.anthropic.output import Blocks
from service.api.anthropic.schemas import MessagesRequest
from service.api.http.routing import Route
from service.api.http.streaming import Emit, event_stream
from service.api.openai.conversation import Conversation, prepared_conversation
from service.api.openai.responses.output import Send
from service.api.openai.usage import TokensUsed

router = APIRouter(tags=["anthropic"], route_class=Route)


@router.post("/v1/messages", response_model=MessageObject, responses={200: {"content": {"text/event-stream": {}}}})
async def messages(body: MessagesRequest, request: Request) -> Response | MessageObject:
    """Answer a conversation."""
    answer = _Answer(body, await prepared_conversation(body, request))
    if body.stream:
        return event_stream(answer.stream, event_of, last="")
    return await answer.whole()


class _Answer:
    """The blocks of one message."""

    def __init__(self, body: MessagesRequest, conversation: Conversation) -> None:
        self._body, self._conversation = body, conversation
        self._used = TokensUsed([conversation.prepared])
        self._id = f"msg_{uuid.uuid4().hex}"

    async def whole(self, send: Send = lambda kind, **fields: None) -> MessageObject:
        """The message at its end; ``send`` gets the events of its blocks."""
        blocks = Blocks(send)
        async with aclosing(self._conversation.parts(0, self._body.sampling())) as parts:
            async for part in parts:
                blocks.add(part.said)
        blocks.close()
        self._used.add(part.piece.generation)
        reason = stop_reason_of(part)
        return self._message(blocks.content, reason, part.piece.stop if reason == "stop_sequence" else None)

    async def stream(self, emit: Emit) -> None:
        def send(kind: str, **fields: Any) -> None:
            emit({"type": kind, **fields}, kind)

        send("message_start", message=self._message([], None, None).model_dump())
        end = await self.whole(send)
        send(
            "message_delta",
            delta=end.model_dump(include={"stop_reason", "stop_sequence"}),
            usage=end.usage.model_dump(),
        )
        send("message_stop")

    def _message(self, content: list[AnswerBlock], reason: StopReason | None, stop: str | None) -> MessageObject:
        """The message so far."""
        return MessageObject(
            id=self._id,
            model=self._conversation.name.name,
            content=content,
            stop_reason=reason,
            stop_sequence=stop,
            usage=MessagesUsage.of(self._used),
            pe=self._conversation.prepared.pe,
            auto=self._conversation.prepared.auto,
        )
