"""Relative positions as learned vectors that score against the query: Shaw's, and Transformer-XL's.

Shaw et al., arXiv:1803.02155, equation 4, for keys only: their term for values adds nothing beside it (table 3).
Dai et al., arXiv:1901.02860, section 3.3, without the memory of hidden states of section 3.2. A cache of keys and
values sees the whole text. The vectors are weights of every layer, so each method is for models that have them, as
attributes of ``attention.relative``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from patches.encoding.geometry import Family, RopeGeometry
from patches.encoding.method import Method
from patches.encoding.recipe import Recipe, RelativeScores

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ClippedKeys:
    """q . a[min(distance, k)], one table of k + 1 vectors per layer, shared by its heads."""

    def __call__(self, attention: Any, query: torch.Tensor, key: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
        table: torch.Tensor = attention.relative.relative_keys.weight.to(query.dtype)
        by_row = query @ table.T
        return by_row.gather(-1, distance.clamp_max(len(table) - 1).expand(*query.shape[:3], -1))


@dataclass(frozen=True)
class ProjectedSinusoids:
    """u . k + (q + v) . W R[distance]; R has all sines before all cosines, as in the released code.

    W is folded into the query. One new token then costs a product with R instead of a projection of all of R.
    """

    def __call__(self, attention: Any, query: torch.Tensor, key: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
        own = attention.relative
        u, v = (bias.to(query.dtype)[:, None] for bias in (own.r_w_bias, own.r_r_bias))
        projection: torch.Tensor = own.r_net.weight.to(query.dtype).unflatten(0, own.r_r_bias.shape)
        waves = _waves(int(distance.max()) + 1, projection.shape[-1]).to(query)
        by_distance: torch.Tensor = (query + v) @ projection @ waves.T
        by_distance = by_distance.gather(-1, distance.expand(*query.shape[:3], -1))
        content: torch.Tensor = u @ key.transpose(-1, -2)
        return by_distance + content


def _waves(distances: int, width: int) -> torch.Tensor:
    """float32 [distances, width]: sines, then cosines, of distance x 10000^(-2i/width)."""
    import torch

    inv_freq = torch.exp(torch.arange(0, width, 2).float() * (-math.log(10_000.0) / width))
    angles = torch.arange(distances).float()[:, None] * inv_freq
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


class _Relative(Method):
    family: ClassVar[Family] = "relative"
    scores: ClassVar[RelativeScores]

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        if not isinstance(geometry.native, type(self)):
            raise ValueError(
                f"method: {self.method} reads weights that a model learns with it, and this model has none: its own "
                f"encoding is {'default' if geometry.native is None else geometry.native.method}"
            )
        return Recipe(None, relative=self.scores)


class Shaw(_Relative):
    summary: ClassVar[str] = "Shaw's relative positions: a learned vector per clipped distance, beside the keys."
    use: ClassVar[str] = "Models trained with it, for example by make train-demo FAMILY=shaw."
    avoid: ClassVar[str] = "Order among tokens further away than the clip: they all look alike."
    reach: ClassVar[str] = "any length: past the clip all distances share one vector"
    evidence: ClassVar[str] = (
        "WMT 2014 English to German, base model: 26.8 BLEU against 26.5 of sinusoids; clipping at 2 to 256 makes no "
        "difference (arXiv:1803.02155, tables 1 and 2)."
    )
    formula: ClassVar[str] = "score = q . (k + a[min(p - j, c)]) / sqrt(d_h), a the learned vectors, c the clip"
    paper: ClassVar[str] = "Shaw et al., arXiv:1803.02155"
    training_free: ClassVar[str] = "None: the vectors are learned with the weights."
    cost: ClassVar[str] = "explicit scores, no fused kernel"
    scores: ClassVar[RelativeScores] = ClippedKeys()

    method: Literal["shaw"] = "shaw"


class TransformerXL(_Relative):
    summary: ClassVar[str] = (
        "Transformer-XL's relative positions: projected sinusoids of the distance, beside the keys."
    )
    use: ClassVar[str] = "Models trained with it, for example by make train-demo FAMILY=transformer_xl."
    avoid: ClassVar[str] = "Comparing with the published model: its memory of hidden states is missing here."
    reach: ClassVar[str] = "a few times L0"
    evidence: ClassVar[str] = (
        "WikiText-103, 128M parameters, with recurrence: 27.02 at the attention length of its training, 26.77 at 500 "
        "(arXiv:1901.02860, table 6)."
    )
    formula: ClassVar[str] = (
        "score = ((q + u) . k + (q + v) . W R[p - j]) / sqrt(d_h); u, v and W are learned, R has sinusoids"
    )
    paper: ClassVar[str] = "Transformer-XL, arXiv:1901.02860"
    training_free: ClassVar[str] = "None: the projection and both biases are learned with the weights."
    cost: ClassVar[str] = "explicit scores, and width / head_dim times as much again for the distances"
    scores: ClassVar[RelativeScores] = ProjectedSinusoids()

    method: Literal["transformer_xl"] = "transformer_xl"
