"""The body of ``POST /perplexity``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from patches import examples, problem
from service.evaluation.documents import DEFAULT_DOCUMENT
from service.evaluation.perplexity.results import Protocol
from service.evaluation.request import Bos, ByLengthRequest, ByPositionRequest, Documents

SWEEP_WINDOWS = 8
"""Windows of each document in a sweep that names no protocol."""


class ScoringRequest(ByLengthRequest):
    """An evaluation that scores tokens by a ``protocol``."""

    protocol: str
    windows: Annotated[int, Field(ge=1)] | None = Field(
        None, description="`tail`: most windows of each document, the first ones; all when absent."
    )

    @model_validator(mode="after")
    def _windows_of_the_protocol(self) -> Self:
        if self.windows is not None and self.protocol != "tail":
            raise problem("without_effect", f"windows has no meaning for protocol {self.protocol}", "windows")
        return self

    @classmethod
    def in_sweep(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Without a protocol `tail`: a sweep compares lengths, so each has the same tokens."""
        return dict(fields) if "protocol" in fields else {"windows": SWEEP_WINDOWS, **fields, "protocol": "tail"}


class PerplexityRequest(ScoringRequest, ByPositionRequest):
    """Perplexity against context length, several encodings in one call."""

    evaluation: Literal["perplexity"] = "perplexity"
    input: Documents = DEFAULT_DOCUMENT
    protocol: Protocol = Field("curve", description="The scored tokens and their context.")
    stride: Annotated[int, Field(ge=1)] | None = Field(
        None, description="`sliding`: tokens between window starts (256). `tail`: between window ends (longest length)."
    )
    tail: Annotated[int, Field(ge=1)] | None = Field(
        None, description="`tail`: scored tokens at the end of each window (256)."
    )
    bos: Bos = Field(
        "auto",
        description="BOS at the start of every window; `auto` does what the tokenizer does. `rolling`: once before the "
        "document; `auto` is then BOS, or end-of-text where there is none, as in lm-evaluation-harness.",
    )

    @model_validator(mode="after")
    def _parameters_of_the_protocol(self) -> Self:
        if self.stride is not None and self.protocol not in ("sliding", "tail"):
            why = f"stride has no meaning for protocol {self.protocol}: use sliding or tail"
            raise problem("without_effect", why, "stride")
        if self.tail is not None and self.protocol != "tail":
            raise problem("without_effect", f"tail has no meaning for protocol {self.protocol}", "tail")
        if self.short_documents == "skip" and self.protocol == "rolling":
            why = "short_documents has no meaning for protocol rolling, which reads short documents too"
            raise problem("without_effect", why, "short_documents")
        return self

    @classmethod
    def example(cls) -> dict[str, Any]:
        return {
            "input": DEFAULT_DOCUMENT,
            "methods": examples(),
            "lengths": [256, 512, 1024, 2048],
        }
