"""Answers of ``/generate`` and events of its streams."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from service.api.response_models.encodings import AutoChoice


class Alternative(BaseModel):
    token_id: int
    token: str
    logprob: float


class TokenLogprob(Alternative):
    top: list[Alternative]


class GenerateUsage(BaseModel):
    prompt_tokens: int
    completion_tokens: int


class Timings(BaseModel):
    """Seconds waiting, until the first token, and for the rest."""

    queue_s: float
    prefill_s: float
    decode_s: float


class ResultEnd(BaseModel):
    """The end of one prompt under one encoding: the last event of its stream. ``pe`` is the encoding as it took
    effect, ``auto`` the choice of that request."""

    index: int
    prompt_index: int
    model: str
    finish_reason: str
    logprobs: list[TokenLogprob] | None
    usage: GenerateUsage
    timings: Timings
    pe: dict[str, Any]
    auto: AutoChoice | None = None


class Result(ResultEnd):
    """One prompt under one encoding. ``pe`` is the encoding as it took effect, ``auto`` the choice of that request."""

    text: str
    token_ids: list[int]


class GenerateResponse(BaseModel):
    model: str
    results: list[Result]
    usage: GenerateUsage


class TextDelta(BaseModel):
    """New text and tokens of the result ``index`` since the last event.

    ``logprobs`` are those of ``token_ids``, in requests for log-probabilities.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None


class PrefillProgress(BaseModel):
    """Prompt tokens of the result ``index`` read so far."""

    index: int
    prompt_tokens_done: int
    prompt_tokens_total: int
