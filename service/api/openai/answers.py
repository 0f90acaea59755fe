"""Answers of completions and chats, as OpenAI and vLLM shape them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from service.api.generation.pieces import FinishReason
from service.api.responses import AutoChoice


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, prompt: int, completion: int) -> Usage:
        return cls(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


class LegacyLogprobs(BaseModel):
    """One entry per token; the first token of a prompt has no prediction, hence null. -inf is -9999."""

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
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    pe: dict[str, Any] | None = None
    auto: AutoChoice | None = None


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


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    pe: dict[str, Any]
    auto: AutoChoice | None = None


class Chat(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
