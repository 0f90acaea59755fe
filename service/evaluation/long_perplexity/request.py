"""The body of ``POST /long_perplexity``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from patches import KnownFields, PositionEncoding, examples
from service.evaluation.documents import DEFAULT_DOCUMENT
from service.evaluation.perplexity.request import tail_in_sweep
from service.evaluation.request import Bos, DocumentsRequest, Tokens
from service.inputs import TextOrTokens

Scoring = Literal["curve", "sliding", "disjoint", "tail"]


class Evaluator(KnownFields):
    """The model that chooses the key tokens: any served one with the same tokenizer, under any encoding."""

    model: str | None = Field(None, description="A served model; the one that is measured when absent.")
    pe: PositionEncoding = Field(
        default_factory=lambda: {"method": "default"},
        validate_default=True,
        description="Its encoding; the checkpoint's own when absent.",
    )


class LongPerplexityRequest(DocumentsRequest):
    """Perplexity over key tokens against context length, several encodings in one call."""

    evaluation: Literal["long_perplexity"] = "long_perplexity"
    input: TextOrTokens = Field(
        DEFAULT_DOCUMENT,
        description="A text, token ids, a list of either (documents), or the name of a built-in document.",
    )
    protocol: Scoring = Field(
        "curve",
        description="The scored tokens and their context, as in `perplexity`, with its defaults. `tail` "
        "has the same key tokens at every length.",
    )
    windows: Annotated[int, Field(ge=1)] | None = Field(
        None, description="`tail`: most windows of each document, the first ones; all when absent."
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

    @model_validator(mode="after")
    def _windows_of_the_protocol(self) -> Self:
        if self.windows is not None and self.protocol != "tail":
            raise ValueError(f"windows has no meaning for protocol {self.protocol}")
        return self

    @classmethod
    def in_sweep(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        return tail_in_sweep(fields)

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
