"""T5's relative position bias: one learned value per head and bucket of distances.

Raffel et al., arXiv:1910.10683, section 2.1, in its causal form. Half of the buckets have one distance each, and the
others grow with its logarithm. The last one takes every distance from ``max_distance`` on. The values are added to the
score without scaling. They belong to a model, so they have no defaults.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from patches.encoding.biases import BucketBias
from patches.encoding.fields import LONGEST
from patches.encoding.geometry import Family, RopeGeometry
from patches.encoding.method import Method
from patches.encoding.recipe import Recipe

Value = Annotated[float, Field(ge=-1e4, le=1e4, strict=True)]
"""Finite in float16 too. If all keys of a query were at minus infinity, it would attend to later ones."""
Table = tuple[Annotated[tuple[Value, ...], Field(min_length=1, max_length=1024)], ...]


class T5Bias(Method):
    also: ClassVar[tuple[str, ...]] = ("t5", "t5_relative_bias")
    summary: ClassVar[str] = "T5 bias: rotation off, a learned value per bucket of distances on."
    use: ClassVar[str] = "Models trained with it, with the table that they learned."
    avoid: ClassVar[str] = "Weights trained with anything else: there is no table for them."
    reach: ClassVar[str] = "any length: all distances past relative_attention_max_distance look alike"
    evidence: ClassVar[str] = (
        "WikiText-103, trained at the length tested: 19.65 at 512, 18.80 at 1024, 18.01 at 3072, against 20.07, "
        "19.33, 18.57 of RoPE (arXiv:2108.12409)."
    )
    formula: ClassVar[str] = "score = q . k x scaling + table[bucket(p - j)][h]"
    paper: ClassVar[str] = "T5, arXiv:1910.10683"
    training_free: ClassVar[str] = "None: the table is learned with the weights."
    cost: ClassVar[str] = "an additive bias per score"
    family: ClassVar[Family] = "bias"

    method: Literal["t5_bias"] = "t5_bias"
    relative_attention_bias: Annotated[Table, Field(max_length=1024)] | None = Field(
        None, description="Learned values [num_buckets][heads]; those that the checkpoint declares when absent."
    )
    relative_attention_num_buckets: Annotated[int, Field(ge=4, le=1024, multiple_of=2, strict=True)] = Field(
        32, description="Buckets, half of them for one distance each."
    )
    relative_attention_max_distance: Annotated[int, Field(ge=3, le=LONGEST, strict=True)] = Field(
        128, description="Distance from which on all share the last bucket."
    )

    @model_validator(mode="after")
    def _buckets_fit(self) -> Self:
        exact, table = self.relative_attention_num_buckets // 2, self.relative_attention_bias
        if self.relative_attention_max_distance <= exact:
            raise ValueError(
                f"relative_attention_max_distance: must be more than half of relative_attention_num_buckets, {exact}"
            )
        if table is not None and len(table) != 2 * exact:
            raise ValueError(f"relative_attention_bias: needs a row per bucket, {2 * exact}, and has {len(table)}")
        return self

    @classmethod
    def example(cls, geometry: RopeGeometry, times: float) -> dict[str, Any]:
        """A bias per bucket and head that falls with the distance, faster in later heads."""
        heads = geometry.num_attention_heads
        table = [[-(head + 1) / heads * math.log1p(bucket) for head in range(heads)] for bucket in range(32)]
        return {"relative_attention_bias": table}

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        table, heads = self.table(geometry), geometry.num_attention_heads
        if any(len(row) != heads for row in table):
            raise ValueError(f"relative_attention_bias: this model has {heads} attention heads, so each row needs them")
        return Recipe(None, score_bias=BucketBias(table, self.relative_attention_max_distance))

    def table(self, geometry: RopeGeometry) -> tuple[tuple[float, ...], ...]:
        """The values in effect.

        Raises:
            ValueError: when neither the request nor the checkpoint has any, or the checkpoint's are of other buckets.
        """
        if self.relative_attention_bias is not None:
            return self.relative_attention_bias
        table = geometry.native.relative_attention_bias if isinstance(geometry.native, T5Bias) else None
        if table is None:
            raise ValueError("relative_attention_bias: missing, and this model declares none")
        if len(table) != self.relative_attention_num_buckets:
            raise ValueError(f"relative_attention_num_buckets: this model's own values are for {len(table)}")
        return table

    def parameters(self, geometry: RopeGeometry) -> dict[str, Any]:
        return super().parameters(geometry) | {"relative_attention_bias": self.table(geometry)}
