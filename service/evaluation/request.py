"""The body of ``POST /perplexity``, and the same thing for the shell."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from patches import PositionEncoding, examples
from service.evaluation.results import Protocol
from service.inputs import TextOrTokens

Tokens = Annotated[int, Field(ge=2, le=(1 << 24) - 1)]


class LengthRange(BaseModel):
    """start, start + step, ... up to and including stop."""

    model_config = ConfigDict(extra="forbid")

    start: Tokens
    stop: Tokens
    step: Annotated[int, Field(ge=1)]

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.stop < self.start:
            raise ValueError("stop must be at least start")
        return self

    def values(self) -> list[int]:
        return list(range(self.start, self.stop + 1, self.step))


def _list_or_range(value: object) -> str:
    return "list" if isinstance(value, list) else "range"


Lengths = Annotated[
    Annotated[list[Tokens], Field(min_length=1), Tag("list")] | Annotated[LengthRange, Tag("range")],
    Discriminator(_list_or_range),
]


class PerplexityRequest(BaseModel):
    """Perplexity against context length, several encodings in one call."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str | None = Field(None, description="A served model; the first one when absent.")
    input: TextOrTokens = Field(
        "python-reference",
        description="A text, token ids, a list of either (documents), or the name of a built-in document.",
    )
    methods: Annotated[list[PositionEncoding], Field(min_length=1)] = Field(
        default_factory=lambda: [{"method": "default"}],
        validate_default=True,
        description="Encodings to compare, each an object with `method` and its parameters.",
    )
    lengths: Lengths | None = Field(
        None, description="Context lengths in tokens; doubling from the trained length to the document when absent."
    )
    protocol: Protocol = Field("curve", description="Which tokens are scored with which context.")
    stride: Annotated[int, Field(ge=1)] | None = Field(
        None, description="`sliding`: tokens between window starts (256). `tail`: between window ends (longest length)."
    )
    tail: Annotated[int, Field(ge=1)] | None = Field(
        None, description="`tail`: scored tokens at the end of each window (256)."
    )
    bos: Literal["auto", "always", "never"] = Field(
        "auto", description="BOS at the start of every window; `auto` does what the tokenizer does."
    )
    stream: bool = Field(False, description="Server-sent events: progress, then the result.")
    timeout_s: Annotated[float, Field(ge=0.01)] | None = Field(
        None, description="Seconds until it is given up with 504; the server's maximum when absent."
    )

    @model_validator(mode="after")
    def _parameters_of_the_protocol(self) -> Self:
        if self.stride is not None and self.protocol not in ("sliding", "tail"):
            raise ValueError(f"stride has no meaning for protocol {self.protocol}: use sliding or tail")
        if self.tail is not None and self.protocol != "tail":
            raise ValueError(f"tail has no meaning for protocol {self.protocol}")
        return self

    def length_values(self) -> list[int] | None:
        """Sorted lengths without repeats, or None for the default."""
        if self.lengths is None:
            return None
        values = self.lengths.values() if isinstance(self.lengths, LengthRange) else self.lengths
        return sorted(set(values))


def example() -> dict[str, Any]:
    """A body that works on the embedded demo models."""
    return {
        "input": "python-reference",
        "methods": examples(),
        "lengths": [256, 512, 1024, 2048],
    }
