"""A resolved encoding as transformers' ``rope_parameters``, for systems that read one encoding from a configuration.

The numbers decide, never the method: LongRoPE's lists of divisors (arXiv:2402.13753) carry any fixed frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from patches.encoding.bands import Band
from patches.encoding.fields import MOST_FACTOR
from patches.encoding.geometry import RopeGeometry
from patches.encoding.masks import CAUSAL, DistanceRange
from patches.encoding.method import Method, WrappingMethod
from patches.encoding.positions import Grouped
from patches.encoding.ramps import mscale
from patches.encoding.recipe import ResolvedRecipe
from patches.encoding.rotary import base_inv_freq
from patches.encoding.schedule import NamedSchedule, RopeType, chooses_pairs
from patches.encoding.temperature import ConstantTemperature
from patches.methods.frequencies.by_parts import Yarn
from patches.methods.frequencies.default import Default

STILL = 1e30
"""Divisor of a pair that does not rotate: its angle stays below 1e-22 at any position."""

OPTIONAL: dict[str, Any] = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
"""Entries that every reader fills with these values."""

WEIGHT_DIGITS = 12
"""Digits of a weight that is computed back from its multiplier: 0.707, not 0.7070000000000003."""

SHARED = "full_attention"
"""The type of layer whose encoding requests choose, where a configuration has an object per type."""

CHUNKS = "dual_chunk_attention_config"
"""Entry for dual chunk attention (Qwen2.5-1M, arXiv:2501.15383), which vLLM reads and transformers 5.24 does not."""

SCALING = {
    *("rope_type", "type", "rope_theta", "factor", "attention_factor", "attn_factor", "alpha"),
    *("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor"),
    *("short_factor", "long_factor", "short_mscale", "long_mscale"),
    *("original_max_position_embeddings", "max_position_embeddings"),
}
"""Entries of ``rope_parameters`` that scale frequencies, in transformers, vLLM and SGLang."""


OLDER_NAMES = {"su": RopeType.LONGROPE}
"""Types in files that transformers 5 no longer reads: Phi-3's first ones."""

AT_ITS_LENGTH = (RopeType.DEFAULT, RopeType.DYNAMIC)
"""Types whose checkpoint declares the length before any scaling. Others declare the one after it."""


class NoRopeParameters(ValueError):
    """A part of the encoding that no ``rope_parameters`` describe; the message names it."""


def rope_parameters(resolved: ResolvedRecipe, geometry: RopeGeometry, length: int) -> list[dict[str, Any]]:
    """Equal ways to write an encoding for a reserved length in tokens, the most specific first.

    A type that transformers names comes first, and it may follow the length. A base alone comes next, if one gives the
    same frequencies. The last way has a divisor per pair. DeepSeek's form of YaRN is the only way to write itself.
    Entries with the default of every reader are left out.

    Raises:
        NoRopeParameters: naming the part that is more than a frequency per pair and a factor on cos and sin.
    """
    latent = _of_latent_attention(resolved, geometry, length)
    if latent is not None:
        return [latent]
    factor = _factor_on_cos_and_sin(resolved, geometry)
    return [
        *_named(resolved, geometry, length, factor),
        *_of_a_base(resolved, geometry, factor),
        _listed(resolved, geometry, length, factor),
    ]


def closest(method: Method, geometry: RopeGeometry, length: int) -> list[Method]:
    """Simpler encodings that serve the same length, the closest first."""
    found: list[Method] = []
    if method.attention_temperature is not None:
        found.append(method.model_copy(update={"attention_temperature": None}))
    if isinstance(method, WrappingMethod) and method.base is not None:
        found.append(method.base)
    if geometry.rotates:
        factor = length / geometry.original_max_position_embeddings
        if factor <= MOST_FACTOR:
            found.append(Yarn(factor=math.ceil(factor)) if factor > 1 else Default())
    return [other for other in found if other != method]


def _of_latent_attention(resolved: ResolvedRecipe, geometry: RopeGeometry, length: int) -> dict[str, Any] | None:
    """DeepSeek's form of YaRN, whose pair of ``mscale`` has a temperature of whole scores; None for anything else."""
    temperature, schedule = resolved.recipe.attention_temperature, resolved.recipe.schedule
    if not (geometry.latent and resolved.is_plain and isinstance(temperature, ConstantTemperature)):
        return None
    own = schedule.rope_parameters(geometry, length) if isinstance(schedule, NamedSchedule) else None
    if own is None or own["rope_type"] != RopeType.YARN or own["factor"] <= 1 or temperature.multiplier <= 1:
        return None
    of_scores = math.sqrt(temperature.multiplier)
    weights = [
        round((multiplier - 1) / math.log(own["factor"]) * 10, WEIGHT_DIGITS)
        for multiplier in (own.pop("attention_factor") * of_scores, of_scores)
    ]
    if weights[0] <= 0:
        return None
    pair = dict(zip(("mscale", "mscale_all_dim"), weights, strict=True))
    return {name: value for name, value in (own | pair).items() if OPTIONAL.get(name) != value}


def _factor_on_cos_and_sin(resolved: ResolvedRecipe, geometry: RopeGeometry) -> float:
    """The factor that gives every score its multiplier.

    Raises:
        NoRopeParameters: as ``rope_parameters``.
    """
    recipe = resolved.recipe
    if not resolved.rotates:
        raise NoRopeParameters("it rotates nothing")
    if any(not band.keeps_positions for band in recipe.bands):
        raise NoRopeParameters("it moves the positions of queries and keys by their distance")
    if any(band.predicate != CAUSAL for band in recipe.bands):
        raise NoRopeParameters("it limits the keys that a query attends to")
    if recipe.score_bias is not None or recipe.relative is not None:
        raise NoRopeParameters("it adds a term to the scores")
    temperature = recipe.attention_temperature
    if temperature is None:
        return resolved.attention_factor
    if not isinstance(temperature, ConstantTemperature):
        raise NoRopeParameters("its attention_temperature depends on the position of the query")
    if geometry.rotary_dim != geometry.head_dim:
        raise NoRopeParameters(
            f"its attention_temperature multiplies whole scores, and this model rotates {geometry.rotary_dim} of "
            f"{geometry.head_dim} dimensions"
        )
    return resolved.attention_factor * math.sqrt(temperature.multiplier)


def _named(resolved: ResolvedRecipe, geometry: RopeGeometry, length: int, factor: float) -> list[dict[str, Any]]:
    schedule = resolved.recipe.schedule
    if schedule is not None and geometry.rotating_pairs is not None and not chooses_pairs(schedule):
        return []  # the type would rotate every pair
    own = schedule.rope_parameters(geometry, length) if isinstance(schedule, NamedSchedule) else None
    if own is None or ("attention_factor" not in own and factor != 1.0):
        return []
    if "attention_factor" in own:
        own["attention_factor"] = factor
    if own["rope_type"] == RopeType.YARN and factor == mscale(own["factor"]):
        del own["attention_factor"]
    return [{name: value for name, value in own.items() if OPTIONAL.get(name) != value}]


def _of_a_base(resolved: ResolvedRecipe, geometry: RopeGeometry, factor: float) -> list[dict[str, Any]]:
    import torch

    if factor != 1.0 or not resolved.rope_theta:
        return []
    frequencies = base_inv_freq(resolved.rope_theta, geometry.rotary_dim, torch.float32)
    if geometry.learned_factors is not None:  # transformers applies them after its type
        frequencies = frequencies * torch.tensor(geometry.learned_factors)
    if tuple(frequencies.tolist()) != resolved.inv_freq:
        return []
    return [{"rope_type": RopeType.DEFAULT, "rope_theta": resolved.rope_theta}]


def _listed(resolved: ResolvedRecipe, geometry: RopeGeometry, length: int, factor: float) -> dict[str, Any]:
    """A divisor per pair of the model's own base, whatever the length."""
    trained_length = geometry.original_max_position_embeddings
    exponents = np.arange(0, geometry.rotary_dim, 2) / geometry.rotary_dim
    rotates = np.array(resolved.inv_freq) > 0
    frequencies = np.where(rotates, np.array(resolved.inv_freq), 1.0)
    plain = geometry.rope_theta**-exponents * (geometry.learned_factors or 1.0)
    divisors = np.where(rotates, plain / frequencies, STILL).tolist()
    return {
        "rope_type": RopeType.LONGROPE,
        "rope_theta": geometry.rope_theta,
        "short_factor": divisors,
        "long_factor": divisors,
        "factor": max(1.0, length / trained_length),  # unused, but transformers warns without it
        "attention_factor": factor,
        "original_max_position_embeddings": trained_length,
    }


def is_by_layer(own: Mapping[str, Any]) -> bool:
    """True if a configuration's ``rope_parameters`` has an object per type of layer."""
    return any(isinstance(value, Mapping) for value in own.values())


def of_today(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Declared ``rope_parameters`` with their type in its place, under its name of today.

    Raises:
        ValueError: when the type is no text.
    """
    kind = parameters.get("rope_type", parameters.get("type", RopeType.DEFAULT))
    if not isinstance(kind, str):
        raise ValueError(f"rope_type {kind!r} is no name")
    given = {name: value for name, value in parameters.items() if name not in ("rope_type", "type")}
    return {"rope_type": str(OLDER_NAMES.get(kind, kind)), **given}


def is_trained_at_its_length(parameters: Mapping[str, Any]) -> bool:
    """True if ``max_position_embeddings`` beside these parameters is the length of the training."""
    return parameters["rope_type"] in AT_ITS_LENGTH


def in_configuration(parameters: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """``parameters`` in place of a configuration's ``own``, whose other entries and other layers stay.

    Raises:
        NoRopeParameters: when layers differ and none of them has full attention.
    """
    if is_by_layer(own):
        if not isinstance(own.get(SHARED), Mapping):
            raise NoRopeParameters(f"this model's frequencies differ by layer, and none are for {SHARED} layers")
        return {**own, SHARED: in_configuration(parameters, own[SHARED])}
    return {**parameters, **{name: value for name, value in own.items() if name not in SCALING}}


def grouping(resolved: ResolvedRecipe) -> tuple[int, int, ResolvedRecipe] | None:
    """(group size, neighbour window, the rest) of Self-Extend (arXiv:2401.01325); None for any other encoding."""
    bands = resolved.recipe.bands
    if len(bands) != 2 or not bands[0].keeps_positions:
        return None
    near, far, keys = bands[0].predicate, bands[1].predicate, bands[1].key_map
    if not isinstance(near, DistanceRange) or not isinstance(keys, Grouped) or near.high is None:
        return None
    size, window = keys.group_size, near.high
    if far != DistanceRange(window) or bands[1].query_map != Grouped(size, window - window // size):
        return None
    return size, window, replace(resolved, recipe=replace(resolved.recipe, bands=(Band(),)))
