"""``POST /v1/chat/completions``, by the chat template of the model or of the settings."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from service.api.generation.pieces import Piece
from service.api.generation.prepared import PreparedPrompt
from service.api.generation.prompts import together
from service.api.generation.token_names import TokenNames
from service.api.http.routing import Route
from service.api.http.streaming import Emit, event_stream
from service.api.openai import logprobs
from service.api.openai.answers import Chat, ChatChoice, ChatLogprobs, ChatMessage, Usage
from service.api.openai.conversation import prepared_conversation
from service.api.openai.names import Named
from service.api.openai.schemas import ChatRequest

router = APIRouter(tags=["openai"], route_class=Route)


@router.post("/v1/chat/completions", response_model=Chat, responses={200: {"content": {"text/event-stream": {}}}})
async def chat(body: ChatRequest, request: Request) -> Response | Chat:
    """Answer a conversation."""
    body.check()
    name, prepared = await prepared_conversation(body, request)
    answer = _Answer(body, name, prepared)
    if body.stream:
        return event_stream(answer.stream)
    return await answer.whole()


class _Answer:
    """One conversation, answered ``n`` times."""

    def __init__(self, body: ChatRequest, name: Named, prepared: PreparedPrompt) -> None:
        self._body, self._prepared = body, prepared
        self._names = TokenNames(name.served.tokenizer)
        self._completion_tokens = 0
        self._frame = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": name.name}

    async def whole(self) -> Chat:
        choices = await together(self._choice(index) for index in range(self._body.n))
        return Chat(**self._frame, choices=choices, usage=self._usage(self._completion_tokens))

    async def _choice(self, index: int) -> ChatChoice:
        pieces = [piece async for piece in self._pieces(index)]
        last = pieces[-1].finish_reason
        assert last is not None  # an engine that cannot finish raises
        return ChatChoice(
            index=index,
            message=ChatMessage(content="".join(piece.text for piece in pieces)),
            logprobs=self._logprobs(pieces),
            finish_reason=last,
            pe=self._prepared.pe,
            auto=self._prepared.auto,
        )

    async def stream(self, emit: Emit) -> None:
        streams = self._body.streams

        def send(choices: list[dict[str, Any]], usage: Usage | None) -> None:
            chunk = {**self._frame, "object": "chat.completion.chunk", "choices": choices}
            if streams.include_usage:
                chunk["usage"] = None if usage is None else usage.model_dump()
            emit(chunk)

        async def one_choice(index: int) -> None:
            frame, tokens = {"index": index, "logprobs": None, "finish_reason": None}, 0

            def send_one(**parts: Any) -> None:
                send([{**frame, **parts}], self._usage(tokens) if streams.continuous_usage_stats else None)

            send_one(delta={"role": "assistant", "content": ""})
            async with aclosing(self._pieces(index)) as pieces:
                async for piece in pieces:
                    tokens = len(piece.generation.token_ids)
                    if piece.text or piece.tokens:
                        shown = self._logprobs([piece])
                        send_one(delta={"content": piece.text}, logprobs=shown and shown.model_dump())
                    if piece.finish_reason:
                        auto = self._prepared.auto
                        echo = {"pe": self._prepared.pe, "auto": auto and auto.model_dump()}
                        send_one(delta={}, finish_reason=piece.finish_reason, **echo)

        await together(one_choice(index) for index in range(self._body.n))
        if streams.include_usage:
            send([], self._usage(self._completion_tokens))

    async def _pieces(self, index: int) -> AsyncGenerator[Piece]:
        async with aclosing(
            self._prepared.generate(index, self._body.sampling(index, self._body.alternatives))
        ) as pieces:
            async for piece in pieces:
                if piece.finish_reason is not None:
                    self._completion_tokens += len(piece.generation.token_ids)
                yield piece

    def _logprobs(self, pieces: list[Piece]) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return logprobs.chat([token for piece in pieces for token in piece.tokens], self._names)

    def _usage(self, completion_tokens: int) -> Usage:
        return Usage.of(len(self._prepared.prompt.token_ids), completion_tokens)
