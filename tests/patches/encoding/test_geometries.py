"""Requests that the geometry of a model decides: refused by it, or resolved to finite numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from patches import METHODS, Recipe, RopeGeometry, describe, is_own, parse, resolve
from patches.encoding.bands import Band
from patches.encoding.masks import merged
from patches.rope_parameters import rope_parameters
from tests import oracles
from tests.methods import REQUESTS, ROWS, Fields, request_id

TRAINED = 256
GEOMETRY = RopeGeometry(64, 64, 10_000.0, TRAINED, 4 * TRAINED, num_attention_heads=4)


def test_proportional_needs_whole_heads_and_a_pair_to_rotate() -> None:
    method = parse({"method": "proportional", "partial_rotary_factor": 0.5})
    with pytest.raises(ValueError, match=r"^method: proportional .*\b16 of 64"):
        resolve(method, replace(GEOMETRY, rotary_dim=16), 1000)
    resolve(parse({"method": "proportional", "partial_rotary_factor": 1 / 32}), GEOMETRY, 1000)
    with pytest.raises(ValueError, match=r"^partial_rotary_factor: .*1/32"):
        resolve(parse({"method": "proportional", "partial_rotary_factor": 0.03}), GEOMETRY, 1000)


def test_clipping_more_pairs_than_there_are_or_one_softly() -> None:
    small = replace(GEOMETRY, rotary_dim=16)
    assert describe(parse({"method": "clipped_rope"}), GEOMETRY, 1000)["n"] == 20
    assert describe(parse({"method": "clipped_rope"}), small, 1000)["n"] == 8
    with pytest.raises(ValueError, match=r"^n: .*\b8 rotary pairs.*\b9$"):
        resolve(parse({"method": "clipped_rope", "n": 9}), small, 1000)
    with pytest.raises(ValueError, match=r"^n: .*hard"):
        resolve(parse({"method": "clipped_rope", "n": 1}), small, 1000)
    resolve(parse({"method": "clipped_rope", "n": 1, "hard": True}), small, 1000)


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if "partial_rotary_factor" in METHODS[row.name].model_fields and not row.whole_head],
    ids=lambda row: row.name,
)
def test_partial_rotary_factor_must_be_the_models(row: Any) -> None:
    fields = {"method": row.name, **row.easy}
    resolve(parse({**fields, "partial_rotary_factor": 1.0}), GEOMETRY, 1000)
    with pytest.raises(ValueError, match=r"^partial_rotary_factor: .*64 of 64"):
        resolve(parse({**fields, "partial_rotary_factor": 0.5}), GEOMETRY, 1000)


def test_partial_rotary_factor_is_rounded_as_transformers_does() -> None:
    phi = replace(GEOMETRY, head_dim=80, rotary_dim=32)
    resolve(parse({"method": "linear", "factor": 2.0, "partial_rotary_factor": 0.4}), phi, 1)
    with pytest.raises(ValueError, match="partial_rotary_factor"):
        resolve(parse({"method": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}), phi, 1)
    odd = replace(GEOMETRY, head_dim=104, rotary_dim=30)
    assert int(104 * (30 / 104)) == 29
    for encoding in ({"method": "linear", "factor": 2.0}, {"method": "default"}):
        shown = parse(encoding).parameters(odd)
        resolve(parse({**encoding, **shown}), odd, 1)


def test_partial_rotary_factor_must_be_that_of_a_model_that_ships_an_encoding() -> None:
    scaled = replace(GEOMETRY, native=parse("yarn:4"))
    with pytest.raises(ValueError, match=r"^partial_rotary_factor: .*64 of 64"):
        resolve(parse({"method": "default", "partial_rotary_factor": 0.5}), scaled, 1000)


def test_an_encoding_of_a_checkpoint_does_not_stand_on_itself() -> None:
    for name in ("self_extend", "resonance"):
        scaled = replace(GEOMETRY, native=parse(name))
        assert resolve(parse("default"), scaled, 1000) == resolve(parse(name), GEOMETRY, 1000)


REFUSED: list[tuple[Fields, dict[str, Any], str]] = [
    ({"method": "ntk", "factor": 2.0}, {"rotary_dim": 2}, "^method: .* at least two rotary frequencies"),
    ({"method": "learned_hierarchical"}, {"family": "learned"}, "^method: .* no table of learned positions"),
    ({"method": "learned"}, {}, "^method: learned is for models trained with learned positions; .* family rotary"),
    ({"method": "alibi"}, {"chooses_by_rotation": True}, "only encodings that rotate apply"),
    ({"method": "alibi"}, {"compresses_keys": True}, "only encodings without windows and biases"),
    ({"method": "streaming"}, {"compresses_keys": True}, "only encodings without windows and biases"),
]


@pytest.mark.parametrize(("fields", "changed", "why"), REFUSED, ids=str)
def test_what_does_not_fit_a_model_is_refused(fields: Fields, changed: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        resolve(parse(fields), replace(GEOMETRY, **changed), 1000)


def test_a_recipe_that_rotates_needs_a_model_that_does() -> None:
    recipe = parse("yarn:4").recipe(GEOMETRY)
    with pytest.raises(ValueError, match="trained without rotary"):
        recipe.resolve(replace(GEOMETRY, family="none"), 1000)


def test_a_model_without_positions_keeps_the_masks_alone() -> None:
    plain = replace(GEOMETRY, family="none", native=parse("none"))
    for request in ("streaming", "lm_infinite", "streaming:sink_tokens=0,window=100"):
        recipe = resolve(parse(request), plain, 1000).recipe
        masks = [band.predicate for band in parse(request).recipe(GEOMETRY).bands]
        assert recipe == Recipe(None, tuple(Band(predicate=mask) for mask in merged(masks)))
        assert recipe.moves
    for request in ("self_extend", "dual_chunk", "rerope", "yarn:4", "resonance"):
        with pytest.raises(ValueError, match="trained without rotary"):
            resolve(parse(request), plain, 1000)


@pytest.mark.parametrize("native", ["yarn:4", "linear:2", "resonance", "self_extend:base=yarn:4", "dynamic"])
def test_default_underneath_reaches_as_far_as_no_base(native: str) -> None:
    scaled = replace(GEOMETRY, native=parse(native))
    for request in ("self_extend", "leaky_rerope", "streaming"):
        own, default = parse(request), parse({"method": request, "base": {"method": "default"}})
        assert default.reached(scaled) == own.reached(scaled)
    assert parse("resonance:base=yarn:4").reached(GEOMETRY) == 4 * TRAINED
    assert parse("resonance:base=dynamic").reached(GEOMETRY) is None


def test_the_checkpoints_own_encoding_ends_with_its_table() -> None:
    geometry = replace(GEOMETRY, family="learned", native=parse("learned"), table_rows=TRAINED)
    own = resolve(parse("default"), geometry, TRAINED)
    assert is_own(own, geometry, TRAINED)
    assert not is_own(own, geometry, TRAINED + 1)
    assert not is_own(resolve(parse("none"), geometry, TRAINED), geometry, TRAINED)


HARMLESS_OR_REFUSED = [
    {"method": "longrope", "short_factor": [1.0] * 32, "long_factor": [1.0] * 32, "factor": 2.0},
    {"method": "yarn", "factor": 2.0, "beta_slow": 1e-320},
    {"method": "yarn", "factor": 2.0, "beta_fast": 1e308},
    {"method": "yarn", "factor": 2.0, "mscale": 1e300, "mscale_all_dim": 1e-300},
    {"method": "ntk_by_parts", "factor": 2.0, "gamma_0": 1e300},
    {"method": "ntk_by_parts", "factor": 2.0, "gamma_1": 1e-320},
    {"method": "ntk_by_parts", "factor": 2.0, "beta_1": 1e-320},
    {"method": "llama3", "low_freq_factor": 1e-320},
    {"method": "ntk", "factor": 4096.0, "rope_theta": 1e308},
    {"method": "yarn", "factor": 2.0, "rope_theta": 1.0000000000000002},
    {"method": "linear", "factor": 4096.0, "rope_theta": 1e308},
    {"method": "dynamic", "factor": 4096.0, "original_max_position_embeddings": 1, "rope_theta": 1e308},
    {"method": "dynamic_linear", "rope_theta": 1e15},
    {"method": "dynamic_yarn", "beta_fast": 1e6, "beta_slow": 1e-6, "rope_theta": 1e15},
    {"method": "dynamic_yarn", "beta_fast": 1e6, "beta_slow": 9e5, "truncate": False},
    {"method": "yarn", "factor": 4096.0, "beta_fast": 1e6, "beta_slow": 1e6, "truncate": False},
    {"method": "yarn", "factor": 4096.0, "beta_fast": 1e-6, "beta_slow": 1e-6, "truncate": False},
    {"method": "yarn_paper", "factor": 4096.0, "alpha": 9.99999e5, "beta": 1e6},
    {"method": "yarn_paper", "factor": 4096.0, "alpha": 1e-6, "beta": 2e-6, "rope_theta": 1e15},
    {"method": "ntk_mixed", "factor": 4096.0, "b": 10.0, "rope_theta": 1e15},
    {"method": "ntk_mixed", "factor": 1.0, "b": 1e-300},
    {"method": "mrrope_uni", "factor": 4096.0, "beta_fast": 1e6, "beta_slow": 9e5, "truncate": False},
    {"method": "mrrope_pro", "factor": 4096.0, "beta_fast": 2e-6, "beta_slow": 1e-6},
    {"method": "mrrope_pro", "factor": 4096.0, "beta_fast": 1e6, "beta_slow": 1e6, "truncate": False},
    {"method": "tailspline", "factor": 4096.0, "beta_fast": 1e6, "beta_slow": 1e-6, "rope_theta": 1e15},
    {"method": "proportional", "factor": 4096.0, "partial_rotary_factor": 1e-300},
    {"method": "custom", "inv_freq": [5e-324] * 32, "attention_factor": 100.0},
    {"method": "resonance", "base": {"method": "linear", "factor": 4096.0, "rope_theta": 1e15}},
    {"method": "resonance", "base": {"method": "custom", "inv_freq": [6.284] * 31 + [5e-324]}},
    {"method": "clipped_rope", "base": {"method": "linear", "factor": 4096.0, "rope_theta": 1e15}, "n": 32},
    {"method": "self_extend", "log_n": True, "neighbor_window": 4},
]


@pytest.mark.parametrize("fields", HARMLESS_OR_REFUSED, ids=request_id)
def test_extreme_numbers_are_refused_or_give_finite_ones(fields: Fields) -> None:
    """Every request that passes validation resolves to finite numbers, or is refused with a field's name."""
    if "original_max_position_embeddings" not in METHODS[fields["method"]].model_fields:
        finite_or_refused(fields)
        return
    for trained_length in (1, 2, 256, 1 << 24):
        finite_or_refused({"original_max_position_embeddings": trained_length, **fields})


def finite_or_refused(fields: Fields) -> None:
    refused = ""
    try:
        resolved = resolve(parse(fields), GEOMETRY, 1 << 20)
    except ValueError as error:
        refused = str(error)
    if refused:
        assert any(name in refused for name in fields if name != "method"), f"names no field: {refused}"
        return
    assert math.isfinite(resolved.rope_theta), "answers carry it as JSON"
    numbers = [*resolved.inv_freq, resolved.attention_factor]
    if resolved.recipe.attention_temperature is not None:
        numbers += resolved.recipe.attention_temperature(torch.arange(10)).tolist()
    assert torch.tensor(numbers, dtype=torch.float32).isfinite().all(), "attention computes in float32"
    assert min(numbers) >= 0


# "default" and the geometry


def test_default_means_the_checkpoints_own_encoding() -> None:
    native = {"method": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
    scaled = replace(GEOMETRY, native=parse(native))
    default = parse({"method": "default"})
    assert resolve(default, scaled, 500) == resolve(parse(native), scaled, 500)
    assert resolve(default, GEOMETRY, 500).inv_freq == pytest.approx(oracles.default(10_000.0, 64), rel=5e-7)
    assert resolve(default, GEOMETRY, 500) != resolve(default, scaled, 500)
    plain = resolve(parse({"method": "default", "rope_theta": 10_000.0}), scaled, 500)
    assert plain == resolve(default, GEOMETRY, 500), "asking for a base asks for plain RoPE"
    assert resolve(parse({"method": "linear", "factor": 2.0}), scaled, 500) == resolve(
        parse({"method": "linear", "factor": 2.0}), GEOMETRY, 500
    ), "other methods start from the unscaled frequencies"


def test_a_native_longrope_keeps_its_lists() -> None:
    lists = {"short_factor": (1.0,) * 32, "long_factor": (2.0,) * 32}
    native = {"rope_type": "longrope", "original_max_position_embeddings": TRAINED, **lists}
    scaled = replace(GEOMETRY, native=parse(native))
    default = parse({"method": "default"})
    assert hash(scaled) == hash(replace(GEOMETRY, native=parse(native)))
    short, long = resolve(default, scaled, TRAINED), resolve(default, scaled, TRAINED + 1)
    assert short.inv_freq == pytest.approx([2 * f for f in long.inv_freq])
    assert short.attention_factor == pytest.approx(oracles.longrope_attention_factor(4.0, TRAINED))


@pytest.mark.parametrize("fields", REQUESTS, ids=request_id)
def test_a_model_trained_without_rotation_refuses_to_rotate(fields: Fields) -> None:
    unrotated = replace(GEOMETRY, family="bias", native=parse({"method": "alibi"}))
    rotates = next(row for row in ROWS if row.name == fields["method"]).rotates
    if fields == {"method": "default"}:
        native = resolve(parse({"method": "alibi"}), unrotated, 10)
        assert resolve(parse(fields), unrotated, 10) == native
    elif rotates:
        with pytest.raises(ValueError, match=r"without rotary|rotates nothing"):
            resolve(parse(fields), unrotated, 10)
    else:
        assert not resolve(parse(fields), unrotated, 10).rotates


STILL = replace(GEOMETRY, rotary_dim=64, native=parse({"method": "proportional", "partial_rotary_factor": 0.25}))
"""As Gemma 4: 8 of its 32 pairs rotate."""


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "linear", "factor": 4.0},
        {"method": "yarn", "factor": 4.0},
        {"method": "ntk", "factor": 4.0},
        {"method": "llama3", "factor": 4.0},
        {"method": "dynamic"},
        {"method": "dynamic_yarn"},
        {"method": "resonance"},
    ],
    ids=str,
)
def test_pairs_that_a_checkpoint_keeps_still_stay_so(fields: dict[str, Any]) -> None:
    """The others turn as in a model that rotates all pairs."""
    length = 4 * STILL.original_max_position_embeddings
    found = resolve(parse(fields), STILL, length)
    whole = resolve(parse(fields), replace(STILL, native=None), length)
    if fields["method"] != "resonance":  # its base is the checkpoint's own
        assert found.inv_freq[:8] == whole.inv_freq[:8]
    assert not any(found.inv_freq[8:])
    assert all(found.inv_freq[:8])
    assert parse(fields).parameters(STILL).get("partial_rotary_factor", 0.25) == 0.25


@pytest.mark.parametrize("fields", [{"method": "dynamic"}, {"method": "proportional"}], ids=str)
def test_a_short_request_is_the_checkpoints_own_where_pairs_stay_still(fields: dict[str, Any]) -> None:
    own = resolve(parse({"method": "default"}), STILL, 100)
    assert resolve(parse(fields), STILL, 100).inv_freq == own.inv_freq
    assert sum(f > 0 for f in own.inv_freq) == 8


def test_a_request_may_choose_the_pairs() -> None:
    whole = resolve(parse({"method": "proportional", "partial_rotary_factor": 1.0}), STILL, 100)
    assert all(whole.inv_freq)
    listed = resolve(parse({"method": "custom", "inv_freq": [0.5] * 32}), STILL, 100)
    assert listed.inv_freq == (0.5,) * 32
    tempered = {"kind": "constant", "multiplier": 1.44, "rotated_only": True}
    for wrapped in (
        {"method": "custom", "inv_freq": [0.5] * 32, "attention_temperature": tempered},
        {"method": "clipped_rope", "base": {"method": "custom", "inv_freq": [0.5] * 32}, "n": 4, "hard": True},
    ):
        assert resolve(parse(wrapped), STILL, 100).inv_freq[:28] == (0.5,) * 28, "also inside another schedule"
    for share in (0.25, 1.0):
        resolve(parse({"method": "linear", "factor": 2.0, "partial_rotary_factor": share}), STILL, 100)
    with pytest.raises(ValueError, match=r"rotates 16 of 64 dimensions, so it must be 0\.25"):
        resolve(parse({"method": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}), STILL, 100)


def test_factors_that_a_model_learned_are_in_every_frequency_but_listed_ones() -> None:
    learned = tuple(1.0 + pair / 64 for pair in range(32))
    model = replace(GEOMETRY, learned_factors=learned)
    for request in ("default", "linear:2", "dynamic", "yarn:4"):
        own, plain = (resolve(parse(request), geometry, 1000).inv_freq for geometry in (model, GEOMETRY))
        assert own == pytest.approx([a * b for a, b in zip(plain, learned, strict=True)], rel=1e-6)
    listed = {"method": "custom", "inv_freq": [0.5] * 32}
    tempered = {"kind": "constant", "multiplier": 1.44, "rotated_only": True}
    for fields in (listed, {**listed, "attention_temperature": tempered}):
        assert resolve(parse(fields), model, 1000).inv_freq == (0.5,) * 32


def test_transformers_reads_still_pairs_as_large_divisors() -> None:
    """A type of transformers would rotate every pair."""
    (form,) = rope_parameters(resolve(parse({"method": "linear", "factor": 4.0}), STILL, 1000), STILL, 1000)
    assert form["rope_type"] == "longrope"
    assert min(form["long_factor"][8:]) > 1e6
