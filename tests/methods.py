"""One row per method: request fields that are easy, fields that are hard, and what must hold of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import assume

from patches import ResolvedRecipe, RopeGeometry, parse, resolve

Fields = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """``easy`` is a typical request, ``hard`` sets every parameter away from its default.

    ``identity`` are the fields that make the method plain RoPE (None: none do). Within the trained
    length, ``plain_when_short`` methods are plain RoPE whatever their fields. Past that length,
    ``tempered_by_length`` ones change their factor on cos and sin. If only the hard request depends
    on the reserved length, ``hard_depends_on_length`` says so. ``whole_head`` methods are refused by
    models that rotate a part of each head. ``rope_type`` is the method's name in transformers, where
    it has one.

    Position maps: ``covers_all`` methods attend to every causal pair, others leave some out.
    ``reach`` computes, from the parameters in effect, the longest input in which no effective distance
    exceeds the trained ones. ``turns_keys`` methods have bands that turn cached keys when they read them.
    ``family`` is what a model must have been trained with to take it. In fields of ``takes_zero``, 0 is a value.
    """

    name: str
    easy: Fields = field(default_factory=dict)
    hard: Fields = field(default_factory=dict)
    identity: Fields | None = None
    rotates: bool = True
    bands: int = 1
    depends_on_length: bool = False
    plain_when_short: bool = False
    tempered_by_length: bool = False
    whole_head: bool = False
    rope_type: str | None = None
    covers_all: bool = True
    reach: Callable[[Fields], float] | None = None
    turns_keys: bool = False
    hard_depends_on_length: bool = False
    family: str = "rotary"
    takes_zero: tuple[str, ...] = ()

    @property
    def requests(self) -> list[Fields]:
        """The two requests as ``parse`` takes them."""
        return [{"method": self.name, **self.easy}, {"method": self.name, **self.hard}]


def trained(parameters: Fields) -> int:
    """The trained length in effect, L0."""
    return int(parameters["original_max_position_embeddings"])


def grouped_reach(parameters: Fields, group: int) -> int:
    """Longest input whose positions, in groups past the window, stay below L0."""
    window = parameters["neighbor_window"]
    return int(trained(parameters) - window + window // group) * group


def learned(buckets: int, heads: int) -> list[list[float]]:
    """A table [buckets][heads] as T5 learns one: of no simple form."""
    return [[2.0 * math.sin(1 + bucket * heads + head) for head in range(heads)] for bucket in range(buckets)]


def dual_chunk_reach(parameters: Fields) -> float:
    """Unbounded, unless a query reaches an untrained position: two chunks on, the first key sees it there."""
    if parameters["formulation"] == "paper":
        return math.inf
    chunk, l0 = parameters["chunk_size"] - parameters["local_window"], trained(parameters)
    return math.inf if min(2 * chunk - 1, parameters["chunk_size"]) < l0 else l0


def streaming_reach(parameters: Fields) -> float:
    """Unbounded, unless the window is too long or the first tokens keep positions that nothing bounds."""
    sinks, l0 = parameters["sink_tokens"], trained(parameters)
    drifts = sinks > 0 and parameters["absolute_positions"]
    return l0 if drifts or sinks + parameters["window"] > l0 else math.inf


def rows(pairs: int = 32, trained_length: int = 256, heads: int = 4) -> list[Row]:
    """The table for a model with ``pairs`` rotary pairs and ``heads`` heads: some lists have one value per pair
    or per head."""
    short = [1.0 + 0.01 * i for i in range(pairs)]
    long = [1.0 + 0.25 * i for i in range(pairs)]
    other_length = trained_length // 2
    underneath = {"base": {"method": "linear", "factor": 2.5}, "original_max_position_embeddings": other_length}
    turns = {"beta_fast": 16.0, "beta_slow": 1.5, "truncate": False, "original_max_position_embeddings": other_length}
    return [
        Row("default", hard={"rope_theta": 5e5}, identity={}, rope_type="default"),
        Row("linear", {"factor": 4.0}, {"factor": 3.7, "rope_theta": 5e5}, {"factor": 1.0}, rope_type="linear"),
        Row("ntk", {"factor": 4.0}, {"factor": 7.3, "rope_theta": 5e5}, {"factor": 1.0}),
        Row(
            "dynamic",
            {},
            {"factor": 2.5, "rope_theta": 5e5, "original_max_position_embeddings": other_length},
            {"factor": 1.0},
            depends_on_length=True,
            plain_when_short=True,
            rope_type="dynamic",
        ),
        Row(
            "ntk_by_parts",
            {"factor": 4.0},
            {
                "factor": 7.3,
                "beta_0": 2.0,
                "beta_1": 0.5,
                "gamma_0": 12.0,
                "gamma_1": 3.0,
                "original_max_position_embeddings": other_length,
            },
            {"factor": 1.0},
        ),
        Row(
            "yarn",
            {"factor": 4.0},
            {
                "factor": 7.3,
                "beta_fast": 16.0,
                "beta_slow": 1.5,
                "truncate": False,
                "mscale": 1.5,
                "mscale_all_dim": 0.5,
                "original_max_position_embeddings": other_length,
            },
            {"factor": 1.0},
            rope_type="yarn",
            takes_zero=("mscale", "mscale_all_dim"),  # switch the ratio off, as in transformers
        ),
        Row(
            "llama3",
            {},
            {
                "factor": 7.3,
                "low_freq_factor": 0.7,
                "high_freq_factor": 5.5,
                "original_max_position_embeddings": other_length,
            },
            {"factor": 1.0},
            rope_type="llama3",
        ),
        Row(
            "longrope",
            {"short_factor": short, "long_factor": long, "factor": 4.0},
            {
                "short_factor": short[::-1],
                "long_factor": long[::-1],
                "attention_factor": 1.3,
                "original_max_position_embeddings": other_length,
            },
            {"short_factor": [1.0] * pairs, "long_factor": [1.0] * pairs, "factor": 1.0},
            depends_on_length=True,
            rope_type="longrope",
        ),
        Row(
            "dynamic_linear",
            {},
            {"rope_theta": 5e5, "original_max_position_embeddings": other_length},
            {},
            depends_on_length=True,
            plain_when_short=True,
        ),
        Row(
            "dynamic_yarn",
            {},
            {"rope_theta": 5e5, **turns},
            {},
            depends_on_length=True,
            plain_when_short=True,
            tempered_by_length=True,
        ),
        Row(
            "yarn_paper",
            {"factor": 4.0},
            {
                "factor": 7.3,
                "alpha": 0.7,
                "beta": 11.0,
                "attention_factor": 1.3,
                "original_max_position_embeddings": other_length,
            },
            {"factor": 1.0},
        ),
        Row("ntk_fixed", {"factor": 4.0}, {"factor": 7.3, "rope_theta": 5e5}, {"factor": 1.0}),
        Row(
            "ntk_mixed",
            {"factor": 4.0},
            {"factor": 7.3, "b": 0.75, "rope_theta": 5e5},
            {"factor": 1.0},
            takes_zero=("b",),  # interpolation
        ),
        Row("mrrope_uni", {"factor": 4.0}, {"factor": 7.3, "attention_factor": 1.3, **turns}, {"factor": 1.0}),
        Row("mrrope_pro", {"factor": 4.0}, {"factor": 7.3, "attention_factor": 1.3, **turns}, {"factor": 1.0}),
        Row("tailspline", {"factor": 4.0}, {"factor": 7.3, "attention_factor": 1.3, **turns}, {"factor": 1.0}),
        Row(
            "proportional",
            {"partial_rotary_factor": 0.25},
            {"partial_rotary_factor": 0.7, "factor": 2.5, "rope_theta": 5e5},
            {},
            whole_head=True,
            rope_type="proportional",
        ),
        Row(
            "custom",
            {"inv_freq": [1.0 / (1 + i) for i in range(pairs)]},
            {"inv_freq": [0.0, *(1.9 * 0.8**i for i in range(1, pairs))], "attention_factor": 1.3},
            {"inv_freq": [10_000.0 ** (-i / pairs) for i in range(pairs)]},
        ),
        Row("resonance", {}, {"base": {"method": "yarn", "factor": 7.3}}),
        Row("clipped_rope", {}, {"base": {"method": "linear", "factor": 3.7}, "n": max(1, pairs // 2), "hard": True}),
        Row("none", hard={"attention_temperature": 1.5}, rotates=False),
        Row("drope", {"factor": 4.0}, {"factor": 7.3, "coefficient": 0.3}, rotates=False),
        Row(
            "alibi",
            hard={
                "alibi_bias_max": 16.0,
                "slope_factor": "dynamic",
                "original_max_position_embeddings": other_length,
                "bias_dtype": "bfloat16",
                "scaled": True,
                "use_variant": False,
            },
            rotates=False,
            hard_depends_on_length=True,
        ),
        Row("sandwich", hard={"dim": 34}, rotates=False),
        *[
            Row(
                name,
                hard={
                    "r1": [0.3 + 0.2 * head for head in range(heads)],
                    "r2": [1.9 / (1 + head) for head in range(heads)],
                },
                rotates=False,
            )
            for name in ("kerple_log", "kerple_power")
        ],
        Row(
            "t5_bias",
            {"relative_attention_bias": learned(32, heads)},
            {
                "relative_attention_bias": learned(16, heads),
                "relative_attention_num_buckets": 16,
                "relative_attention_max_distance": 40,
            },
            rotates=False,
        ),
        Row(
            "self_extend",
            {"group_size": 4, "neighbor_window": 16},
            {
                "group_size": 3,
                "neighbor_window": 7,
                "attention_temperature": "log_n",
                **underneath,
            },
            {"group_size": 1, "neighbor_window": 16},
            bands=2,
            turns_keys=True,
            reach=lambda p: grouped_reach(p, p["group_size"]),
        ),
        Row(
            "rerope",
            {},
            {"window": 7, **underneath},
            {"window": trained_length},
            bands=2,
            turns_keys=True,
            reach=lambda p: math.inf if p["window"] < trained(p) else trained(p),
        ),
        Row(
            "leaky_rerope",
            {},
            {"window": 7, "scaling_factor": 2.75, **underneath},
            {"scaling_factor": 1.0},
            bands=2,
            turns_keys=True,
            reach=lambda p: int((trained(p) - 1 - p["window"]) * p["scaling_factor"]) + p["window"] + 1,
        ),
        Row(
            "dual_chunk",
            {"formulation": "paper"},
            {"formulation": "repository", "chunk_size": 13, "local_window": 2, **underneath},
            {"chunk_size": trained_length, "local_window": 0},
            bands=3,
            reach=dual_chunk_reach,
        ),
        Row(
            "string",
            {},
            {"shifted_offset": 11, "small_local_value": 3, **underneath},
            {"shifted_offset": 20, "small_local_value": 20},
            bands=2,
            reach=lambda p: trained(p) + p["shifted_offset"] - p["small_local_value"],
        ),
        Row(
            "dpe",
            {"group_factors": [4, 2]},
            {"group_factors": [1 + i % 4 for i in range(pairs)], "neighbor_window": 7, **underneath},
            {"group_factors": [1]},
            bands=2,
            turns_keys=True,
            reach=lambda p: min(grouped_reach(p, factor) for factor in p["group_factors"]),
        ),
        Row(
            "lm_infinite",
            {"n_global": 3, "n_local": 9, "limit_distance": 14},
            {"n_global": 2, "n_local": 6, "limit_distance": 5, **underneath},
            {"n_local": trained_length},
            bands=2,
            turns_keys=True,
            covers_all=False,
            # The released distance of the first tokens, L0, is one more than was ever trained.
            reach=lambda p: math.inf if max(p["n_local"] - 1, p["limit_distance"]) < trained(p) else p["n_local"],
        ),
        Row(
            "streaming",
            {"sink_tokens": 2, "window": 7},
            {"sink_tokens": 3, "window": 9, "absolute_positions": True, **underneath},
            {"window": trained_length},
            bands=2,
            covers_all=False,
            reach=streaming_reach,
        ),
    ]


def absolute_rows() -> list[Row]:
    """The rest of the table: methods for models that add positions to their tokens."""
    learned: Fields = {"rotates": False, "family": "learned"}
    sinusoidal: Fields = {"rotates": False, "family": "sinusoidal"}
    return [
        Row("learned", hard={"attention_temperature": 1.5}, **learned),
        Row("learned_interpolation", {"factor": 4.0}, {"align": "ends"}, hard_depends_on_length=True, **learned),
        Row("learned_hierarchical", {}, {"alpha": 0.3}, **learned),
        Row("sinusoidal", hard={"attention_temperature": 1.5}, **sinusoidal),
        Row("sinusoidal_interpolation", {"factor": 4.0}, {"factor": 2.5}, **sinusoidal),
    ]


def relative_rows() -> list[Row]:
    """Methods for models that learned them, each for its own."""
    relative: Fields = {"rotates": False, "family": "relative"}
    return [Row(name, hard={"attention_temperature": 1.5}, **relative) for name in ("shaw", "transformer_xl")]


ROWS = rows()
RELATIVE_ROWS = relative_rows()
OTHER_ROWS = absolute_rows()
REQUESTS = [request for row in ROWS for request in row.requests]
"""Every method twice, easy and hard, for 32 pairs."""


def shape_of(resolved: ResolvedRecipe) -> tuple[object, ...]:
    """The kinds of a recipe's parts: all that attention distinguishes, apart from numbers."""
    recipe = resolved.recipe
    bands = tuple((type(band.query_map), type(band.key_map), type(band.predicate)) for band in recipe.bands)
    parts = (recipe.score_bias, recipe.attention_temperature, recipe.absolute, recipe.relative)
    return resolved.rotates_at, resolved.attention_factor != 1.0, bands, *map(type, parts)


def one_per_shape(requests: Iterable[Fields], geometry: RopeGeometry, length: int) -> list[Fields]:
    """The last request, usually a hard one, of every shape of recipe: attention sees recipes, not methods."""
    return list({shape_of(resolve(parse(fields), geometry, length)): fields for fields in requests}.values())


def has_effect(fields: Fields, geometry: RopeGeometry, length: int) -> bool:
    """False for a request that begins beyond every window of a model, which is refused."""
    try:
        resolve(parse(fields), geometry, length)
    except ValueError as error:
        if "no effect" not in str(error):
            raise
        return False
    return True


def request_id(request: Fields) -> str:
    """Short name of a request for test ids."""
    numbers = [f"{k}={v}" for k, v in request.items() if k != "method" and not isinstance(v, list | dict)]
    return "-".join([str(request["method"]), *numbers])


def assume_in_reach(fields: Fields, model: RopeGeometry) -> None:
    """Leave out requests that are refused, as a range of turns that no pair makes."""
    try:
        parse(fields).encoding(model)
    except ValueError as error:
        assume("is out of reach" not in str(error))
        raise
