"""NLL of a method at one length, and by position: the results that ``per_token`` computes."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from service.evaluation.scores import Group, Interval

PositionBin = Annotated[
    int | None,
    Field(
        exclude_if=lambda width: width is None,
        description="Tokens of each bin of `nll_by_position`; absent where bins double.",
    ),
]


class PositionBucket(BaseModel):
    """Mean NLL (nats) of the tokens predicted from start <= context < stop tokens of context."""

    start: int
    stop: int
    nll_mean: float
    tokens: int


class LengthResult(BaseModel):
    """One method at one length. Sums and means are natural-log NLL over the scored tokens.

    ``perplexity`` is exp(nll_mean); ``perplexity_window_mean`` averages window means first, as the YaRN script does.
    ``bits_per_byte`` and ``byte_perplexity`` divide by the UTF-8 bytes of the scored tokens, ``word_perplexity`` by the
    words that end in them. Words are pieces between runs of white space, empty ones included, as in
    lm-evaluation-harness. All three are comparable between tokenizers.
    """

    length: int
    perplexity: float
    nll_sum: float
    nll_mean: float
    bits_per_byte: float
    byte_perplexity: float
    word_perplexity: float | None = Field(description="Null where no word ends among the scored tokens.")
    perplexity_window_mean: float
    tokens_scored: int
    bytes_scored: int
    words_scored: int
    windows: int
    documents: int
    interval: Interval | None
    groups: list[Group] = Field(
        description="(NLL sum, tokens) of each document in order. A single document has at most 256 equal blocks of a "
        "multiple of 64 scored tokens, the last one shorter. Neighbouring blocks are not independent: intervals and "
        "paired comparisons join them to the quarters of the document."
    )
