"""The facts about a model that an encoding may depend on: shapes and training, never weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Family = Literal["rotary", "learned", "sinusoidal", "bias", "relative", "none"]
"""Source of a checkpoint's positions: rotation, a table or formula added to its tokens, a bias, learned vectors, or
none. The learned vectors are for distances, in every layer."""


class NativeMethod(Protocol):
    """A checkpoint's own encoding: a ``patches.encoding.method.Method``, which is made from a geometry."""

    @property
    def method(self) -> str: ...


@dataclass(frozen=True)
class RopeGeometry:
    """Shapes and training facts of one model.

    ``rotary_dim`` is the rotated width, ``rotary_offset`` its first dimension inside a head (0 except in latent
    attention). ``original_max_position_embeddings`` is the trained length L0 in tokens. ``native`` is the checkpoint's
    own encoding, which requests call "default"; None is plain RoPE. ``family`` is that of the training. ``table_rows``
    is the number of positions in a learned table. ``latent`` is multi-head latent attention (DeepSeek). ``reverses`` is
    rotation in the opposite sense (nanochat). ``keeps_positions`` is the reason why attention cannot rotate queries and
    keys by other positions than their own, if there is one. ``compresses_keys`` is true where layers also attend to
    keys that each cover several tokens (DeepSeek-V4). ``chooses_by_rotation`` is true where an indexer of the layers
    chooses their keys by other rotated states (DeepSeek-V3.2). ``declared`` is the request that the checkpoint's
    ``rope_parameters`` would be, where its model reads them otherwise. ``learned_factors`` multiply the frequencies of
    every encoding that does not list its own (Mistral Large 4). ``window`` is the number of tokens in the largest
    window or chunk of the layers that requests rotate; None if one has neither. ``widest`` is that of all layers.
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
    reverses: bool = False
    keeps_positions: str | None = None
    compresses_keys: bool = False
    chooses_by_rotation: bool = False
    declared: NativeMethod | None = None
    learned_factors: tuple[float, ...] | None = None
    window: int | None = None
    widest: int | None = None

    @property
    def rotating_pairs(self) -> int | None:
        """Pairs that rotate in the checkpoint's own encoding, the fastest first; None where all do.

        Three quarters of Gemma 4's pairs were trained to carry no position. Other frequencies leave them so.
        """
        rotating = getattr(self.native, "rotating_pairs", None)
        return None if rotating is None else int(rotating(self))

    @property
    def rotary_share(self) -> float:
        """Share of a head's dimensions that rotate."""
        pairs = self.rotating_pairs
        return (self.rotary_dim if pairs is None else 2 * pairs) / self.head_dim

    @property
    def rotates(self) -> bool:
        """True for checkpoints trained with rotary embeddings."""
        return self.family == "rotary"

    @property
    def adds_positions(self) -> bool:
        """True for checkpoints that add position embeddings to their tokens."""
        return self.family in ("learned", "sinusoidal")
