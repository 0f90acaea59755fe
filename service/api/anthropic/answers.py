"""Answers of ``/v1/messages``, as Anthropic's API shapes them."""

from __future__ import annotations

import uuid
from typing import Any, Literal

from pydantic import BaseModel, Field

from service.api.openai.conversation import Part
from service.api.openai.usage import TokensUsed
from service.api.response_models.encodings import AutoChoice

UNSIGNED = "unsigned"


class Text(BaseModel):
    type: Literal["text"] = "text"
    text: str = ""


class Thought(BaseModel):
    """Reasoning. Some clients keep none without a signature; this server reads none."""

    type: Literal["thinking"] = "thinking"
    thinking: str = ""
    signature: str = UNSIGNED


class ToolUse(BaseModel):
    type: Literal["tool_use"] = "tool_use"
    id: str = Field(default_factory=lambda: f"toolu_{uuid.uuid4().hex}")
    name: str
    input: dict[str, Any]


AnswerBlock = Text | Thought | ToolUse

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


def stop_reason_of(part: Part) -> StopReason:
    """The reason of the last part of an answer."""
    if part.finish_reason == "tool_calls":
        return "tool_use"
    if part.finish_reason == "length":
        return "max_tokens"
    return "end_turn" if part.piece.stop is None else "stop_sequence"


class MessagesUsage(BaseModel):
    """Tokens. Those of the prompt are the sum of ``input_tokens`` and both of the cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0

    @classmethod
    def of(cls, used: TokensUsed) -> MessagesUsage:
        usage = used.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return cls(
            input_tokens=usage.prompt_tokens - cached,
            output_tokens=usage.completion_tokens,
            cache_read_input_tokens=cached,
        )


class MessageObject(BaseModel):
    """``pe`` is the encoding as it takes effect, and ``auto`` the choice of that request."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage
    pe: dict[str, Any]
    auto: AutoChoice | None


class Count(BaseModel):
    input_tokens: int
