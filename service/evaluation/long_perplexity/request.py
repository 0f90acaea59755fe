"""The body of ``POST /long_perplexity``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from patches import KnownFields, PositionEncoding, examples
from service.evaluation.documents import DEFAULT_DOCUMENT
from service.evaluation.perplexity.request import ScoringRequest
from service.evaluation.request import Bos, Documents, Tokens

Scoring = Literal["curve", "sliding", "disjoint", "tail"]


class Evaluator(KnownFields):
    """The model that chooses the key tokens: any served one with the same tokenizer, under any encoding."""

    model: str | None = Field(None, description="A served model; the one that is measured when absent.")
    pe: PositionEncoding = Field(
        default_factory=lambda: {"method": "default"},
        validate_default=True,
        description="Its encoding; the checkpoint's own when absent.",
    )


class LongPerplexityRequest(ScoringRequest):
    """Perplexity over key tokens against context length, several encodings in one call."""

    evaluation: Literal["long_perplexity"] = "long_perplexity"
    input: Documents = DEFAULT_DOCUMENT
    protocol: Scoring = Field(
        "curve",
        description="The scored tokens and their context, as in `perplexity`, with its defaults. `tail` "
        "has the same key tokens at every length.",
    )
    bos: Bos = Field("auto", description="BOS at the start of every window; `auto` does what the tokenizer does.")
    evaluator: Evaluator = Field(default_factory=Evaluator, description="The model that chooses the key tokens.")
    long_context: Tokens | None = Field(
        None, description="Tokens of the evaluator's long windows; the length that it was trained at when absent."
    )
    short_context: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Tokens of context that its short windows leave at least; long_context / 4, at most 4096."
    )
    stride: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="Tokens between its windows, long and short ones; short_context / 4 when absent, where that fits.",
    )
    alpha: Annotated[float, Field(gt=0)] = Field(
        2.0, description="A key token gains more log-probability (nats) than this from the long context."
    )
    beta: Annotated[float, Field(le=0)] = Field(
        -2.0, description="A key token has more log-probability (nats) than this in the long context."
    )

    @classmethod
    def example(cls) -> dict[str, Any]:
        # The published thresholds would leave the demo models one key token in 2048: these gain less from context.
        return {
            "input": DEFAULT_DOCUMENT,
            "methods": examples(),
            "lengths": [256, 512, 1024, 2048],
            "short_context": 16,
            "stride": 64,
            "alpha": 0.5,
            "beta": -4.0,
        }
