"""``POST /v1/chat/completions``, by the chat template of the model or of the settings."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from service.api.generation.pieces import Piece
from service.api.generation.prompts import together
from service.api.generation.token_names import TokenNames
from service.api.http.routing import Route
from service.api.http.streaming import Emit, event_stream
from service.api.openai import logprobs
from service.api.openai.answers import (
    CalledFunction,
    Chat,
    ChatChoice,
    ChatLogprobs,
    ChatMessage,
    ToolCall,
    Usage,
)
from service.api.openai.conversation import Conversation, Part, prepared_conversation
from service.api.openai.schemas import ChatRequest
from service.api.openai.token_ids import TokenIds
from service.api.openai.tools.reading import Call
from service.api.openai.usage import TokensUsed
from service.engine.generation import Generation

router = APIRouter(tags=["openai"], route_class=Route)


@router.post("/v1/chat/completions", response_model=Chat, responses={200: {"content": {"text/event-stream": {}}}})
async def chat(body: ChatRequest, request: Request) -> Response | Chat:
    """Answer a conversation."""
    body.check()
    answer = _Answer(body, await prepared_conversation(body, request))
    if body.stream:
        return event_stream(answer.stream)
    return await answer.whole()


def _written(call: Call) -> ToolCall:
    return ToolCall(function=CalledFunction(name=call.name, arguments=call.arguments))


class _Answer:
    """One conversation, answered ``n`` times."""

    def __init__(self, body: ChatRequest, conversation: Conversation) -> None:
        self._body, self._conversation, self._prepared = body, conversation, conversation.prepared
        self._names = TokenNames(conversation.name.served.tokenizer)
        self._used = TokensUsed([conversation.prepared])
        self._frame = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": conversation.name.name,
        }

    async def whole(self) -> Chat:
        choices = await together(self._choice(index) for index in range(self._body.n))
        return Chat(**self._frame, choices=choices, usage=self._used.usage(), prompt_token_ids=self._prompt_ids)

    @property
    def _prompt_ids(self) -> list[int] | None:
        return self._prepared.prompt.token_ids if self._body.return_token_ids else None

    async def _choice(self, index: int) -> ChatChoice:
        parts = [part async for part in self._parts(index)]
        said = [part.said for part in parts]
        text, reasoning = "".join(each.text for each in said), "".join(each.reasoning for each in said)
        calls = [_written(call) for each in said for call in each.calls]
        last = parts[-1].finish_reason
        assert last is not None  # an engine that cannot finish raises
        content = text or (None if calls else "")
        return ChatChoice(
            index=index,
            message=ChatMessage(content=content, reasoning_content=reasoning or None, tool_calls=calls or None),
            logprobs=self._logprobs([part.piece for part in parts]),
            finish_reason=last,
            stop_reason=parts[-1].piece.stop_reason,
            pe=self._prepared.pe,
            auto=self._prepared.auto,
            token_ids=parts[-1].piece.generation.token_ids if self._body.return_token_ids else None,
        )

    async def stream(self, emit: Emit) -> None:
        streams = self._body.streams

        def send(choices: list[dict[str, Any]], usage: Usage | None, prompt_ids: list[int] | None = None) -> None:
            chunk = {**self._frame, "object": "chat.completion.chunk", "choices": choices}
            if prompt_ids is not None:
                chunk["prompt_token_ids"] = prompt_ids
            if streams.include_usage:
                chunk["usage"] = None if usage is None else usage.model_dump()
            emit(chunk)

        async def one_choice(index: int) -> None:
            frame, calls = {"index": index, "logprobs": None, "finish_reason": None}, 0
            so_far, reasoning = Generation(), 0

            def send_one(parts: dict[str, Any], prompt_ids: list[int] | None = None) -> None:
                usage = self._used.so_far(so_far, 0, reasoning) if streams.continuous_usage_stats else None
                send([{**frame, **parts}], usage, prompt_ids)

            content = None if self._conversation.offer.must else ""  # as OpenAI begins calls and texts
            send_one({"delta": {"role": "assistant", "content": content}}, self._prompt_ids)
            ids = TokenIds()
            async with aclosing(self._parts(index)) as parts:
                async for part in parts:
                    so_far, reasoning = part.piece.generation, part.reasoning
                    for fields in self._with_ids(self._deltas(part, calls), part, ids):
                        send_one(fields)
                    calls += len(part.said.calls)

        await together(one_choice(index) for index in range(self._body.n))
        if streams.include_usage:
            send([], self._used.usage())

    def _with_ids(self, deltas: Iterator[dict[str, Any]], part: Part, ids: TokenIds) -> list[dict[str, Any]]:
        """``deltas`` of a part, the first of them with its token ids. A token of a call may have no other chunk."""
        found = list(deltas)
        if self._body.return_token_ids and (own := ids.take(part.piece, final=part.finish_reason is not None)):
            found = found or [{"delta": {}}]
            found[0]["token_ids"] = own
        return found

    def _deltas(self, part: Part, calls: int) -> Iterator[dict[str, Any]]:
        """Fields of the chunks of one part, which comes behind ``calls`` calls."""
        said, shown = part.said, self._logprobs([part.piece]) if part.piece.tokens else None
        if said.reasoning:
            yield {"delta": {"reasoning_content": said.reasoning}}
        if said.text or shown:
            delta = {"content": said.text} if said.text else {}  # tokens of calls have no text
            yield {"delta": delta, "logprobs": shown and shown.model_dump()}
        for number, call in enumerate(said.calls, calls):
            yield {"delta": {"tool_calls": [{"index": number, **_written(call).model_dump()}]}}
        if part.finish_reason:
            auto = self._prepared.auto
            echo = {"pe": self._prepared.pe, "auto": auto and auto.model_dump()}
            yield {"delta": {}, "finish_reason": part.finish_reason, "stop_reason": part.piece.stop_reason, **echo}

    async def _parts(self, index: int) -> AsyncGenerator[Part]:
        sampling = self._body.sampling(index, self._body.alternatives)
        async with aclosing(self._conversation.parts(index, sampling)) as parts:
            async for part in parts:
                yield part
                if part.finish_reason is not None:
                    self._used.add(part.piece.generation, reasoning=part.reasoning)

    def _logprobs(self, pieces: list[Piece]) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return logprobs.chat([token for piece in pieces for token in piece.tokens], self._names)
