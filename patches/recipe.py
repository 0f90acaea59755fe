"""A positional encoding as a value: frequency schedule, bands, score bias, attention temperature.

A recipe knows no model class, no batch and no request. Resolving it for a geometry and a reserved
length gives the numbers that the attention functions read.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

import torch

from patches.masks import CAUSAL, Predicate


@dataclass(frozen=True)
class RopeGeometry:
    """What an encoding may know about a model: shapes and training facts, never weights.

    ``rotary_dim`` is the rotated width (head_dim x partial_rotary_factor);
    ``original_max_position_embeddings`` is the trained length L0 in tokens. ``native`` is the
    checkpoint's own encoding as request fields, which is what the method "default" stands for.
    ``rotates`` is false for a checkpoint that was trained without rotary embeddings.
    """

    head_dim: int
    rotary_dim: int
    rope_theta: float
    original_max_position_embeddings: int
    max_position_embeddings: int
    num_attention_heads: int
    interleaved: bool = False
    rotates: bool = True
    native: tuple[tuple[str, object], ...] = ()


class Frequencies(NamedTuple):
    """``inv_freq`` float32 [rotary_dim / 2], the factor on cos and sin, and the base in effect."""

    inv_freq: torch.Tensor
    attention_factor: float
    rope_theta: float


class Schedule(Protocol):
    """Geometry and reserved length (tokens, prompt + max_new_tokens) -> frequencies."""

    @property
    def depends_on_length(self) -> bool: ...

    def frequencies(self, geometry: RopeGeometry, length: int) -> Frequencies: ...


class PositionMap(Protocol):
    """Positions int64 [n] -> the positions used as rotation angles, same shape."""

    def __call__(self, position: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class Identity:
    """Every token keeps its own position."""

    def __call__(self, position: torch.Tensor) -> torch.Tensor:
        return position


IDENTITY = Identity()


class ScoreBias(Protocol):
    """(q_idx [q, 1], kv_idx [1, k]) -> float32 [num_heads, q, k], added to the scaled scores."""

    def __call__(self, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor: ...


class AttentionTemperature(Protocol):
    """q_idx [q] -> float32 [q], a multiplier on the whole score of that query."""

    def __call__(self, q_idx: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class Band:
    """Where ``predicate`` holds, the query is rotated by ``query_map`` and the key by ``key_map``."""

    query_map: PositionMap = IDENTITY
    key_map: PositionMap = IDENTITY
    predicate: Predicate = CAUSAL


@dataclass(frozen=True)
class Recipe:
    """One positional encoding. ``schedule`` None means no rotation.

    Raises:
        ValueError: without a band, or with several bands and nothing to rotate.
    """

    schedule: Schedule | None
    bands: tuple[Band, ...] = (Band(),)
    score_bias: ScoreBias | None = None
    attention_temperature: AttentionTemperature | None = None

    def __post_init__(self) -> None:
        if not self.bands:
            raise ValueError("a recipe needs at least one band")
        if self.schedule is None and any(not _is_identity(band) for band in self.bands):
            raise ValueError("position maps have no meaning without a frequency schedule")

    @property
    def depends_on_length(self) -> bool:
        return self.schedule is not None and self.schedule.depends_on_length

    def resolve(self, geometry: RopeGeometry, length: int) -> ResolvedRecipe:
        """Fix the frequencies for one request. ``length`` counts prompt + new tokens.

        Raises:
            ValueError: when the recipe rotates and the checkpoint was trained without rotation.
        """
        if self.schedule is None:
            return ResolvedRecipe(self, (), 1.0, 0.0, None, interleaved=geometry.interleaved)
        if not geometry.rotates:
            raise ValueError(
                "this model was trained without rotary embeddings: only encodings that rotate nothing apply to it"
            )
        inv_freq, attention_factor, rope_theta = self.schedule.frequencies(geometry, length)
        return ResolvedRecipe(
            recipe=self,
            inv_freq=tuple(inv_freq.tolist()),
            attention_factor=float(attention_factor),
            rope_theta=float(rope_theta),
            length=length if self.depends_on_length else None,
            interleaved=geometry.interleaved,
        )


def _is_identity(band: Band) -> bool:
    return band.query_map == IDENTITY and band.key_map == IDENTITY


@dataclass(frozen=True)
class ResolvedRecipe:
    """A recipe with its numbers: what a slot holds and what a response echoes.

    ``inv_freq`` is empty when nothing rotates. ``length`` is what a length-dependent schedule was resolved
    for; it takes no part in comparison, so that equal numbers share a slot whatever led to them.
    """

    recipe: Recipe
    inv_freq: tuple[float, ...]
    attention_factor: float
    rope_theta: float
    length: int | None = field(compare=False)
    interleaved: bool = field(default=False, kw_only=True)

    def __hash__(self) -> int:
        # Tables are looked up by it in every layer: a few numbers tell recipes apart, equality compares the rest.
        return hash((self.inv_freq[-1:], self.attention_factor, self.rope_theta))

    @property
    def rotates(self) -> bool:
        return bool(self.inv_freq)

    @cached_property
    def rotates_at(self) -> Literal["never", "cache_write", "cache_read"]:
        """Derived, never configured: at write when one key rotation serves every query."""
        if not self.rotates:
            return "never"
        if all(_is_identity(band) for band in self.recipe.bands):
            return "cache_write"
        return "cache_read"

    @cached_property
    def is_plain(self) -> bool:
        """Ordinary causal softmax attention once the cache holds the keys as it stands."""
        recipe = self.recipe
        return (
            self.rotates_at != "cache_read"
            and len(recipe.bands) == 1
            and recipe.bands[0].predicate == CAUSAL
            and recipe.score_bias is None
            and recipe.attention_temperature is None
        )

    @cached_property
    def frequency_hash(self) -> str:
        """First 12 hex digits of the SHA-256 of the float32 frequencies and the factor."""
        numbers = torch.tensor([*self.inv_freq, self.attention_factor], dtype=torch.float32)
        return hashlib.sha256(numbers.numpy().tobytes()).hexdigest()[:12]
