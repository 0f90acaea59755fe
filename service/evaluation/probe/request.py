"""The body of a probe."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from patches import examples
from service.evaluation.documents import DEFAULT_DOCUMENT
from service.evaluation.probe.results import SegmentOf
from service.evaluation.request import MOST_IN_RANGE, Bos, ByPositionRequest, Documents, Seed, Tokens


class ProbeRequest(ByPositionRequest):
    """Attention mass, copying and loss by distance, several encodings in one call.

    Attention is measured at each of ``lengths`` (the trained length and 4 times it when absent), loss by position at
    the longest.
    """

    evaluation: Literal["probe"] = "probe"
    input: Documents = DEFAULT_DOCUMENT
    distances: Annotated[list[Tokens], Field(min_length=1, max_length=MOST_IN_RANGE, fail_fast=True)] | None = Field(
        None,
        description="Tokens from a segment's first occurrence to its second; 16, 32, ... as far as the longest "
        "length goes when absent.",
    )
    queries: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Attention is averaged over this many last positions of each length (64)."
    )
    samples: Annotated[int, Field(ge=1, le=1024)] = Field(8, description="Segments drawn, the same at every distance.")
    segment: Annotated[int, Field(ge=2, le=1024)] = Field(16, description="Tokens of a segment.")
    segment_of: SegmentOf = Field(
        "random",
        description="`random`: tokens in random order, which only copying predicts. `document`: a stretch of text, "
        "for models that cannot copy random tokens.",
    )
    seed: Seed = Field(0, description="Of the drawn segments.")
    bos: Bos = Field("auto", description="BOS at the start of every pass; `auto` does what the tokenizer does.")

    @classmethod
    def example(cls) -> dict[str, Any]:
        return {
            "input": DEFAULT_DOCUMENT,
            "methods": examples(),
            "lengths": [256, 1024],
            "distances": [16, 64, 128, 256, 512],
            "samples": 4,
            "segment_of": "document",
        }
