"""Sandwich: of sinusoidal position embeddings only the inner product, as a bias on distance.

Chi et al., arXiv:2212.10356, section 5: p_m . p_n = sum over i of cos((m - n) / 10000^(2i / d)). A compression ratio
per head divides it, 8k / n for head k = 1..n. The value at distance 0, d / 2, is subtracted so that no score rises;
softmax ignores the difference. Pairs count from 0, as in the paper's listing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from patches.encoding.geometry import Family, RopeGeometry
from patches.encoding.method import Method
from patches.encoding.recipe import Recipe

if TYPE_CHECKING:
    import torch

LARGEST_DIM = 512
"""Four times the paper's. A table of L distances takes at most 512 L products. One query takes as many to attend to L
keys in a layer of 256 dimensions."""

LEAST_TABLE, MOST_BYTES = 4096, 1 << 28
"""Distances in the smallest table, and bytes of all tables: 64 of a million distances each."""


def _waves(position: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position / 10000^(2i / dim), each float64 [n, dim / 2], for angles are large."""
    import torch

    frequency = 10_000.0 ** (-2 * torch.arange(dim // 2, dtype=torch.float64) / dim)
    angle = position.cpu().double()[:, None] * frequency
    return angle.cos(), angle.sin()


def _products(dim: int, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """p_m . p_n - dim / 2 for positions m of ``first`` and n of ``second``, float64 [first, second] on the CPU."""
    (cos, sin), (other_cos, other_sin) = _waves(first, dim), _waves(second, dim)
    return cos @ other_cos.T + sin @ other_sin.T - dim / 2


class _Tables:
    """Products by distance, one table for each width and device, the least recently used dropped beyond a size."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._lock = most_bytes, threading.Lock()
        self._tables: OrderedDict[tuple[int, torch.device], torch.Tensor] = OrderedDict()

    def at_least(self, length: int, dim: int, device: torch.device) -> torch.Tensor:
        """float32 [n] for distances 0 .. n - 1, of which there are ``length`` or more."""
        import torch

        with self._lock:
            table = self._tables.get((dim, device))
            if table is not None and len(table) >= length:
                self._tables.move_to_end((dim, device))
                return table
        # Distance a + b is that of positions a and -b, so a table of n distances needs 2 sqrt(n) waves. Few lengths,
        # so that one table serves many steps.
        bits = (max(length, LEAST_TABLE) - 1).bit_length()
        steps = torch.arange(1 << (bits // 2))
        starts = torch.arange(0, 1 << bits, len(steps))
        table = _products(dim, starts, -steps).flatten().float().to(device)
        with self._lock:
            self._tables[dim, device] = table
            self._tables.move_to_end((dim, device))
            cached = sum(other.nbytes for other in self._tables.values())
            while cached > self._most_bytes and len(self._tables) > 1:
                cached -= self._tables.popitem(last=False)[1].nbytes
        return table


_tables = _Tables(MOST_BYTES)


@dataclass(frozen=True)
class SandwichBias:
    """(sum over i < dim / 2 of cos(distance / 10000^(2i / dim)) - dim / 2) x heads / 8k for head k.

    ``part`` are the heads that are computed, all of them when None.
    """

    dim: int
    heads: int
    part: range | None = None

    @property
    def by_distance(self) -> bool:
        return True

    def of_heads(self, heads: slice) -> SandwichBias:
        return replace(self, part=range(self.heads)[heads])

    def __call__(self, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        import torch

        distance = (q_idx - kv_idx).clamp_min(0)
        farthest = int(distance.max())
        if distance.numel() <= farthest:  # scattered pairs, as in a picture: fewer than in a table
            assert q_idx.shape[1] == kv_idx.shape[0] == 1
            products = _products(self.dim, q_idx[:, 0], kv_idx[0]).float().to(distance.device)
            products = products.masked_fill(distance == 0, 0.0)
        else:
            products = _tables.at_least(farthest + 1, self.dim, distance.device)[distance]
        computed = range(self.heads) if self.part is None else self.part
        ratio = torch.arange(computed.start + 1, computed.stop + 1, device=q_idx.device) * 8 / self.heads
        return products / ratio[:, None, None]


class Sandwich(Method):
    summary: ClassVar[str] = "Sandwich: rotation off, the inner product of sinusoidal embeddings as a bias on."
    use: ClassVar[str] = "Models trained with it."
    avoid: ClassVar[str] = "Weights trained with anything else, where it is a negative control."
    reach: ClassVar[str] = "any length: the bias falls with the logarithm of the distance"
    evidence: ClassVar[str] = (
        "OpenWebText2, ArXiv, GitHub, trained at 512: falls like KERPLE and T5 bias, without a learned parameter "
        "(arXiv:2212.10356)."
    )
    formula: ClassVar[str] = (
        "score = q . k / sqrt(d_h) + (sum_i cos((p - j) / 10000^(2i/D)) - D/2) H / (8h). D = dim, H the number "
        "of heads, h from 1"
    )
    paper: ClassVar[str] = "Sandwich, arXiv:2212.10356"
    training_free: ClassVar[str] = "For models trained with it; on a RoPE checkpoint it removes the positions."
    cost: ClassVar[str] = "an additive bias per score"
    family: ClassVar[Family] = "bias"

    method: Literal["sandwich"] = "sandwich"
    dim: Annotated[int, Field(ge=2, le=LARGEST_DIM, multiple_of=2, strict=True)] = Field(
        128,
        description=f"Width d of the sinusoidal embeddings: even, at most {LARGEST_DIM}; the paper has 128 throughout.",
    )

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        return Recipe(None, score_bias=SandwichBias(self.dim, geometry.num_attention_heads))
