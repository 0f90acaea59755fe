"""What a perplexity evaluation returns. The same models serve the API, the shell and the plots."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Protocol = Literal["curve", "sliding", "disjoint", "tail"]


class Interval(BaseModel):
    """95 % interval of the perplexity. ``kind`` says over what: documents (bootstrap) or blocks of 64
    consecutive tokens of the one document (standard error)."""

    low: float
    high: float
    kind: Literal["documents", "blocks"]


class PositionBucket(BaseModel):
    """Mean NLL (nats) of the tokens predicted from start <= context < stop tokens of context."""

    start: int
    stop: int
    nll_mean: float
    tokens: int


class LengthResult(BaseModel):
    """One method at one length. Sums and means are natural-log NLL over the scored tokens.

    ``perplexity`` is exp(nll_mean); ``perplexity_window_mean`` averages window means first, as the
    YaRN script does. ``bits_per_byte`` divides by the UTF-8 bytes that the scored tokens stand for.
    """

    length: int
    perplexity: float
    nll_sum: float
    nll_mean: float
    bits_per_byte: float
    perplexity_window_mean: float
    tokens_scored: int
    bytes_scored: int
    windows: int
    documents: int
    interval: Interval | None


class MethodResult(BaseModel):
    """Every length of one method, with the encoding that was in effect at each length."""

    label: str
    pe: dict[str, Any] = Field(description="The request's encoding, resolved at the longest length.")
    frequency_hashes: dict[int, str] = Field(description="Hash of the resolved frequencies, by length.")
    model: str
    passes: int = Field(description="Forward passes over documents that this method took.")
    seconds: float
    lengths: list[LengthResult]
    nll_by_position: list[PositionBucket] = Field(description="At the longest length.")


class DocumentInfo(BaseModel):
    name: str
    tokens: int
    bytes: int


class PerplexityResult(BaseModel):
    """A whole evaluation. ``trained_length`` is where plain RoPE ends."""

    model_config = ConfigDict(protected_namespaces=())

    id: str
    model: str
    trained_length: int
    protocol: Protocol
    parameters: dict[str, Any] = Field(description="Window, stride and tail as they took effect.")
    bos: bool = Field(description="Whether every window starts with the model's BOS token.")
    lengths: list[int]
    documents: list[DocumentInfo]
    methods: list[MethodResult]
    seconds: float
    links: dict[str, str] = Field(default_factory=dict, description="The same result as CSV, PNG and HTML.")


class Progress(BaseModel):
    """Tokens scored so far out of all, and the method at work."""

    tokens_done: int
    tokens_total: int
    label: str
    seconds: Annotated[float, Field(ge=0)]
