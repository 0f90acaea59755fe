"""Answers of completions and chats, as OpenAI and vLLM shape them."""

from __future__ import annotations

import uuid
from typing import Any, Literal

from pydantic import BaseModel, Field, SerializerFunctionWrapHandler, model_serializer

from service.api.generation.pieces import FinishReason
from service.api.openai.token_ids import OptionalIds
from service.api.response_models.encodings import AutoChoice

StopReason = str | int | None
"""The stop string or the token of ``stop_token_ids`` that ended the answer, as in vLLM; null for any other end."""


class PromptTokensDetails(BaseModel):
    """``cached_tokens`` of the prompts were in the prefix cache for every answer."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """``reasoning_tokens`` are those of ``reasoning_content``."""

    reasoning_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class LegacyLogprobs(BaseModel):
    """One entry per token; the first token of a prompt has no prediction, hence null. -inf is -9999.

    A part of a character has the name of its bytes, such as `bytes:\\xc3`.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(BaseModel):
    logprob: float
    rank: int
    decoded_token: str


class CompletionChoice(BaseModel):
    """``pe`` is the encoding as it took effect, ``auto`` the choice of that request. In a stream both come with the
    finish reason."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: StopReason = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    pe: dict[str, Any] | None = None
    auto: AutoChoice | None = None
    prompt_token_ids: OptionalIds = None
    token_ids: OptionalIds = None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None


class ChatAlternative(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatToken(ChatAlternative):
    top_logprobs: list[ChatAlternative]


class ChatLogprobs(BaseModel):
    content: list[ChatToken]


ChatFinishReason = FinishReason | Literal["tool_calls"]


class CalledFunction(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str = Field(default_factory=lambda: f"call_{uuid.uuid4().hex}")
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    """``content`` is null in a message of calls. If no response template reads reasoning, ``content`` has it."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None

    @model_serializer(mode="wrap")
    def _without_what_it_lacks(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        return {name: value for name, value in fields.items() if value is not None or name == "content"}


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: StopReason
    pe: dict[str, Any]
    auto: AutoChoice | None = None
    token_ids: OptionalIds = None


class Chat(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: OptionalIds = None
