"""Types of request fields that several methods and temperatures share, each with its allowed range."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

MOST_FACTOR = 4096.0

Factor = Annotated[float, Field(ge=1.0, le=MOST_FACTOR, strict=True)]
"""Multiple of the trained length."""

LONGEST = 1 << 24
"""Most tokens that a request can reserve: positions have 24 bits."""

Length = Annotated[int, Field(ge=2, le=LONGEST, strict=True)]
"""Tokens."""

Turns = Annotated[float, Field(ge=1e-6, le=1e6, strict=True)]
"""Full turns of a rotary pair over the trained length."""

AttentionFactor = Annotated[float, Field(ge=0.01, le=100.0, strict=True)]
"""Factor on cos and sin."""

YarnFactor = Annotated[
    AttentionFactor | None, Field(description="Multiplies cos and sin; 0.1 ln(factor) + 1 when absent.")
]

Multiplier = Annotated[float, Field(ge=0.01, le=10.0, strict=True)]
"""At 0.01 attention is nearly uniform. Far below, float32 scores are 0, and a masked 0 x -inf is NaN."""
