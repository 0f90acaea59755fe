"""The facts about a model that an encoding may depend on: shapes and training, never weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Family = Literal["rotary", "learned", "sinusoidal", "bias", "relative", "none"]
"""How a checkpoint was taught positions: rotation, a table or formula added to its tokens, a bias, learned vectors for
distances in every layer, or not at all."""


class NativeMethod(Protocol):
    """A checkpoint's own encoding: a ``patches.encoding.method.Method``, which is made from a geometry."""

    @property
    def method(self) -> str: ...


@dataclass(frozen=True)
class RopeGeometry:
    """What an encoding may know about a model: shapes and training facts, never weights.

    ``rotary_dim`` is the rotated width and ``rotary_offset`` where it begins inside a head (0 except in
    latent attention); ``original_max_position_embeddings`` is the trained length L0 in tokens. ``native``
    is the checkpoint's own encoding, which is what the method "default" stands for; None is plain RoPE.
    ``family`` is what the checkpoint was trained with. ``table_rows`` is how many positions a learned
    table of absolute positions holds. ``latent`` is multi-head latent attention (DeepSeek).
    """

    head_dim: int
    rotary_dim: int
    rope_theta: float
    original_max_position_embeddings: int
    max_position_embeddings: int
    num_attention_heads: int
    interleaved: bool = False
    native: NativeMethod | None = None
    family: Family = "rotary"
    rotary_offset: int = 0
    table_rows: int | None = None
    latent: bool = False

    @property
    def rotates(self) -> bool:
        """Whether the checkpoint was trained with rotary embeddings."""
        return self.family == "rotary"

    @property
    def adds_positions(self) -> bool:
        """Whether the checkpoint adds position embeddings to its tokens."""
        return self.family in ("learned", "sinusoidal")
