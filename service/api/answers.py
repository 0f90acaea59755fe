"""What the routes of Ropeway's own API answer with: for the routes, and for clients, which need nothing else."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class Alternative(BaseModel):
    token_id: int
    token: str
    logprob: float


class TokenLogprob(Alternative):
    top: list[Alternative]


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int


class Timings(BaseModel):
    """Seconds waiting, until the first token, and for the rest."""

    queue_s: float
    prefill_s: float
    decode_s: float


class ResultEnd(BaseModel):
    """How one prompt under one encoding ended: the last event of its stream. ``pe`` is the encoding as it took
    effect."""

    index: int
    prompt_index: int
    model: str
    finish_reason: str
    logprobs: list[TokenLogprob] | None
    usage: Usage
    timings: Timings
    pe: dict[str, Any]


class Result(ResultEnd):
    """One prompt under one encoding. ``pe`` is the encoding as it took effect."""

    text: str
    token_ids: list[int]


class GenerateResponse(BaseModel):
    model: str
    results: list[Result]
    usage: Usage


class TextDelta(BaseModel):
    """What has been generated since the event before, of the result ``index``."""

    index: int
    text: str
    token_ids: list[int]


class PrefillProgress(BaseModel):
    """Prompt tokens of the result ``index`` read so far."""

    index: int
    prompt_tokens_done: int
    prompt_tokens_total: int


class MethodInfo(BaseModel):
    """One method: what it does, what it is for, what it costs, and the JSON schema of its parameters with defaults.

    ``reach`` is the length that it can serve, L0 the trained one; ``family`` is what a checkpoint counts as that
    was trained with it.
    """

    method: str
    family: str
    summary: str
    formula: str
    use: str
    avoid: str
    reach: str
    training_free: str
    evidence: str
    paper: str
    cost: str
    rotates_at: str
    parameters: dict[str, Any]


class MethodList(BaseModel):
    methods: list[MethodInfo]


class ModelInfo(BaseModel):
    """A served model and its limits, in tokens. ``variants`` maps a kind of training to a served model."""

    id: str
    default: bool
    architecture: str
    parameters: int
    vocab_size: int
    trained_length: int
    max_length: int
    pe: dict[str, Any]
    variants: dict[str, str]
    device: str
    dtype: str


class ModelList(BaseModel):
    models: list[ModelInfo]


class Live(BaseModel):
    status: str


class Ready(BaseModel):
    """Per model: requests running and waiting, scoring jobs, cache in use, engine restarts."""

    status: str
    models: dict[str, dict[str, int]]
