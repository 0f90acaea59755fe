"""A positional encoding as a value: frequency schedule, bands, score bias, attention temperature.

A recipe knows no model class, no batch and no request. Resolving it for a geometry and a reserved
length gives the numbers that the attention functions read.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import numpy as np

from patches.encoding.bands import Band, PositionMap, refuse_without_effect
from patches.encoding.geometry import RopeGeometry
from patches.encoding.masks import CAUSAL, EVERY_PAIR, DistanceRange, FirstKeys, merged
from patches.encoding.schedule import Schedule, chooses_pairs, with_learned

if TYPE_CHECKING:
    import torch
    from torch import nn

Part = TypeVar("Part")
ROTATES_NOTHING = "this model was trained without rotary embeddings: only encodings that rotate nothing apply to it"
ROTATION_CHOOSES = (
    "only encodings that rotate apply to this model: its layers choose keys by other rotated states. Without "
    "rotation many of these scores are equal, and later text decides between them"
)


class ScoreBias(Protocol):
    """(q_idx [q, 1], kv_idx [1, k]) -> float32 [num_heads, q, k], added to the scaled scores."""

    @property
    def by_distance(self) -> bool:
        """True if distance alone decides: one table then serves all queries."""
        ...

    def of_heads(self, heads: slice) -> ScoreBias:
        """The bias of some heads, for a rank that computes only those."""
        ...

    def __hash__(self) -> int: ...

    def __call__(self, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor: ...


class RelativeScores(Protocol):
    """Scores of a query by distance, from weights that a layer learned.

    Takes the layer's attention module, query [rows, heads, q, head_dim], key [rows, heads, k, head_dim] and distance
    int64 [q, k] >= 0. Returns [rows, heads, q, k], which is added to query . key before scaling.
    """

    def __call__(
        self, attention: nn.Module, query: torch.Tensor, key: torch.Tensor, distance: torch.Tensor
    ) -> torch.Tensor: ...


class AttentionTemperature(Protocol):
    """q_idx [q] -> float32 [q], a multiplier on that query's scaled products with keys, before biases."""

    def __call__(self, q_idx: torch.Tensor) -> torch.Tensor: ...


class AbsoluteMap(Protocol):
    """A position as a weighted sum of real-valued positions of the model's own absolute embedding.

    Positions int64 [n] -> (weights float32 [n, m], positions float64 [n, m]).
    """

    def __call__(self, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True)
class NothingAdded:
    """No position embedding: an empty sum."""

    def __call__(self, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        nothing = torch.empty(*position.shape, 0, device=position.device)
        return nothing, nothing.double()


NOTHING_ADDED = NothingAdded()


@dataclass(frozen=True)
class Recipe:
    """One positional encoding. ``schedule`` None means no rotation.

    A part with ``depends_on_length`` depends on the request's reserved length; ``at(length)`` fixes it. Schedules take
    the length in ``frequencies``. ``absolute`` is for checkpoints that add positions to their token embeddings; None
    leaves their own table unchanged. ``relative`` is for checkpoints whose layers learned vectors for distances.

    Raises:
        ValueError: without a band, or with position maps and nothing to rotate.
    """

    schedule: Schedule | None
    bands: tuple[Band, ...] = (Band(),)
    score_bias: ScoreBias | None = None
    attention_temperature: AttentionTemperature | None = None
    absolute: AbsoluteMap | None = None
    relative: RelativeScores | None = None

    def __post_init__(self) -> None:
        if not self.bands:
            raise ValueError("a recipe needs at least one band")
        if self.schedule is None and any(not band.keeps_positions for band in self.bands):
            raise ValueError("position maps have no meaning without a frequency schedule")

    @property
    def depends_on_length(self) -> bool:
        parts = (self.schedule, self.score_bias, self.attention_temperature, self.absolute)
        return any(_depends_on_length(part) for part in parts)

    @property
    def moves(self) -> bool:
        """True if distances or masks differ from those of plain RoPE."""
        return self.bands != (Band(),)

    @cached_property
    def base(self) -> PositionMap:
        """The map under which queries and keys are written: the key map of the band with the most keys.

        A band with other maps turns what it reads by the difference. So most cached keys are read as they are.
        """
        return max(self.bands, key=lambda band: band.predicate.most_keys).key_map

    @property
    def sink_window(self) -> tuple[int, int] | None:
        """(num_sinks, window_size): counts of the first and last keys that any later query can reach; None for all."""
        predicates = [band.predicate for band in self.bands]
        first = [p.count for p in predicates if isinstance(p, FirstKeys)]
        last = [p.high for p in predicates if isinstance(p, DistanceRange) and p.high is not None]
        return (max(first, default=0), max(last)) if last and len(first) + len(last) == len(predicates) else None

    def resolve(self, geometry: RopeGeometry, length: int) -> ResolvedRecipe:
        """Fix the numbers for one request. ``length`` counts prompt + new tokens.

        Raises:
            ValueError: when the recipe does not fit the checkpoint's training, or reads a learned table past its last
                row. The message says why.
        """
        import torch

        self._refuse_other_families(geometry)
        refuse_without_effect(self.bands, geometry)
        fixed = replace(
            self,
            score_bias=_at(self.score_bias, length),
            attention_temperature=_at(self.attention_temperature, length),
            absolute=_at(self.absolute, length),
        )
        self._refuse_positions_past_the_table(geometry, length)
        inv_freq, attention_factor, rope_theta = (), 1.0, 0.0
        if fixed.schedule is not None:
            frequencies, attention_factor, rope_theta = fixed.schedule.frequencies(geometry, length, torch.float32)
            if geometry.rotating_pairs is not None and not chooses_pairs(fixed.schedule):
                frequencies[geometry.rotating_pairs :] = 0.0
            frequencies = with_learned(frequencies, fixed.schedule, geometry)
            inv_freq = tuple(frequencies.tolist())
        if geometry.chooses_by_rotation and geometry.rotates and not any(inv_freq):
            raise ValueError(ROTATION_CHOOSES)
        return ResolvedRecipe(
            recipe=fixed,
            inv_freq=inv_freq,
            attention_factor=float(attention_factor),
            rope_theta=float(rope_theta),
            length=length if self.depends_on_length else None,
            interleaved=geometry.interleaved,
            offset=geometry.rotary_offset,
            reverses=geometry.reverses,
        )

    def _refuse_other_families(self, geometry: RopeGeometry) -> None:
        if self.schedule is not None and not geometry.rotates:
            raise ValueError(ROTATES_NOTHING)
        if self.absolute is not None and not geometry.adds_positions:
            raise ValueError("this model adds no position embeddings to its tokens: there is no table to map")
        reason = geometry.keeps_positions
        if reason is not None and any(not band.keeps_positions for band in self.bands):
            raise ValueError(
                f"only encodings that keep the positions of queries and keys apply to this model: {reason}"
            )
        if geometry.compresses_keys and (self.moves or self.score_bias is not None):
            raise ValueError(
                "only encodings without windows and biases apply to this model: its keys cover several tokens and have "
                "no single distance"
            )

    def _refuse_positions_past_the_table(self, geometry: RopeGeometry, length: int) -> None:
        rows = geometry.table_rows
        if rows is not None and (reached := self._rows_read(length)) > rows:
            raise ValueError(
                f"this model's table has {rows} positions. Under this encoding, the {length} reserved tokens "
                f"(prompt and new ones) would read {reached} of them"
            )

    def _rows_read(self, length: int) -> int:
        """Rows of a table of learned positions that ``length`` tokens need."""
        import torch

        last, absolute = torch.tensor([length - 1]), _at(self.absolute, length)
        positions = last if absolute is None else absolute(last)[1]
        return int(positions.max()) + 1 if positions.numel() else 0

    def longest(self, geometry: RopeGeometry, most: int) -> int:
        """The longest reserved length up to ``most`` that the model's table has positions for."""
        rows = geometry.table_rows
        return most if rows is None else bisect_right(range(1, most + 1), rows, key=self._rows_read)


def _depends_on_length(part: object) -> bool:
    return bool(getattr(part, "depends_on_length", False))


def _at(part: Part, length: int) -> Part:
    """``part`` as it is for a reserved length."""
    fixed: Part = part.at(length) if _depends_on_length(part) else part  # type: ignore[attr-defined]
    return fixed


@dataclass(frozen=True)
class ResolvedRecipe:
    """A recipe with its numbers, as in a slot and in the echo of a response.

    ``inv_freq`` is empty when nothing rotates. ``length`` is the reserved length of length-dependent parts; comparison
    ignores it, so that equal numbers share a slot.
    """

    recipe: Recipe
    inv_freq: tuple[float, ...]
    attention_factor: float
    rope_theta: float
    length: int | None = field(compare=False)
    interleaved: bool = field(default=False, kw_only=True)
    offset: int = field(default=0, kw_only=True)
    reverses: bool = field(default=False, kw_only=True)

    def __hash__(self) -> int:
        # Every layer looks up tables by it: a few numbers distinguish most recipes, equality compares the rest.
        return hash((self.inv_freq[-1:], self.attention_factor, self.rope_theta))

    @property
    def rotates(self) -> bool:
        return bool(self.inv_freq)

    @cached_property
    def rotates_at(self) -> Literal["never", "cache_write", "cache_read"]:
        """Derived, never configured: at read if some band turns keys that were written under the base."""
        if not self.rotates:
            return "never"
        if all(band.key_map == self.recipe.base for band in self.recipe.bands):
            return "cache_write"
        return "cache_read"

    @cached_property
    def turns(self) -> tuple[float, ...]:
        """``inv_freq`` with the sign of the model's own rotation: angles per position of queries and keys."""
        return tuple(-each for each in self.inv_freq) if self.reverses else self.inv_freq

    @cached_property
    def is_plain(self) -> bool:
        """True for ordinary causal softmax attention, with or without a temperature."""
        return self.is_causal and self.recipe.score_bias is None

    @cached_property
    def is_causal(self) -> bool:
        """True for causal attention to keys at their own positions, with or without a bias or a temperature."""
        recipe = self.recipe
        return (
            len(recipe.bands) == 1
            and recipe.bands[0].query_map == recipe.base
            and recipe.bands[0].predicate == CAUSAL
            and recipe.relative is None
        )

    @cached_property
    def unrotated(self) -> ResolvedRecipe:
        """The recipe in a layer that does not rotate: its masks and its temperature, no positions."""
        bands = tuple(Band(predicate=predicate) for predicate in merged([b.predicate for b in self.recipe.bands]))
        recipe = Recipe(None, bands, attention_temperature=self.recipe.attention_temperature)
        return ResolvedRecipe(recipe, (), 1.0, 0.0, self.length, interleaved=self.interleaved, offset=self.offset)

    @cached_property
    def unmasked(self) -> ResolvedRecipe:
        """The recipe in a layer whose own mask decides over all pairs, causality included."""
        return replace(self, recipe=replace(self.recipe, bands=(Band(predicate=EVERY_PAIR),)))

    def of_heads(self, heads: slice) -> ResolvedRecipe:
        """The recipe on a rank that computes only these attention heads."""
        bias = self.recipe.score_bias
        if bias is None:
            return self
        return replace(self, recipe=replace(self.recipe, score_bias=bias.of_heads(heads)))

    @cached_property
    def frequency_hash(self) -> str:
        """First 12 hex digits of the SHA-256 of the float32 frequencies and the factor."""
        numbers = np.array([*self.inv_freq, self.attention_factor], dtype=np.float32)
        return hashlib.sha256(numbers.tobytes()).hexdigest()[:12]
