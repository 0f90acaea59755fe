"""The encodings that methods propose for a model and a length."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from patches import METHODS, Method, RopeGeometry, alike, candidates, label_of, parse, resolve
from patches.encoding.geometry import Family
from patches.proposals import declares_scaling

ROTARY = RopeGeometry(
    head_dim=64,
    rotary_dim=64,
    rope_theta=10_000.0,
    original_max_position_embeddings=256,
    max_position_embeddings=256,
    num_attention_heads=4,
)
ALIBI = replace(ROTARY, rotary_dim=0, family="bias", native=parse({"method": "alibi", "alibi_bias_max": 4.0}))
LEARNED = replace(ROTARY, rotary_dim=0, family="learned", native=parse({"method": "learned"}), table_rows=256)


def proposed_for(geometry: RopeGeometry, length: int) -> list[Method]:
    try:
        return candidates(geometry, length)
    except ValidationError as error:
        pytest.fail(f"{error.title}.candidates leaves the range of a field at {length} tokens: clip it there\n{error}")


@pytest.mark.parametrize("times", [1.5, 2, 4, 16, 64])
@pytest.mark.parametrize("geometry", [ROTARY, ALIBI, LEARNED], ids=["rotary", "alibi", "learned"])
def test_proposals_fit_and_differ(geometry: RopeGeometry, times: float) -> None:
    length = int(256 * times)
    proposed = proposed_for(geometry, length)
    resolved = [resolve(method, geometry, length) for method in proposed]
    assert len(set(resolved)) == len(proposed) > 1
    assert all(METHODS[method.method].family in (geometry.family, "rotary") for method in proposed)


def test_the_own_encoding_comes_first_and_is_alone_within_the_trained_length() -> None:
    assert [method.method for method in candidates(ROTARY, 256)] == ["default"]
    assert candidates(ROTARY, 257)[0].method == "default"


def test_a_declared_scaling_is_compared_with_plain_rope_and_the_maps_over_it() -> None:
    scaled = replace(ROTARY, native=parse("yarn:4"), max_position_embeddings=1024)
    assert [label_of(method) for method in candidates(scaled, 256)] == ["default", "linear(factor=1)"]
    labels = {label_of(method) for method in candidates(scaled, 1024)}
    assert {"linear(factor=1)", "rerope", "rerope(base=linear:1)", "streaming(base=linear:1)"} <= labels
    assert len(labels) <= 3 * 4**2, "three rounds of halving"
    over_plain = parse({"method": "self_extend", "group_size": 6, "base": {"method": "linear", "factor": 1.0}})
    at_half = METHODS["self_extend"].candidates(scaled, 512)[0].model_copy(update={"base": over_plain.base})  # type: ignore[attr-defined]
    assert alike(over_plain, scaled, 1024, 512) == at_half


@pytest.mark.parametrize(("native", "declares"), [("linear:2", True), ("linear:1", False), ("resonance", False)])
def test_a_factor_of_one_is_no_scaling(native: str, declares: bool) -> None:
    own = replace(ROTARY, native=parse(native))
    assert declares_scaling(own) == declares
    assert any("base=linear:1" in label_of(method) for method in candidates(own, 1024)) == declares


def test_a_declared_map_is_compared_with_plain_rope() -> None:
    mapped = replace(ROTARY, native=parse({"method": "dual_chunk", "chunk_size": 128, "local_window": 32}))
    labels = [label_of(method) for method in candidates(mapped, 1024)]
    assert labels[:2] == ["default", "linear(factor=1)"]
    assert {"yarn(factor=4)", "streaming"} <= {*labels}


def test_of_equal_numbers_one_is_proposed() -> None:
    """With two rotating pairs, the ramps of YaRN, TailSpline and MrRoPE-Uni have no pair between their ends."""
    few = replace(ROTARY, rotary_dim=4)
    found = [resolve(method, few, 1024) for method in candidates(few, 1024)]
    scaled = [(each.inv_freq, each.attention_factor) for each in found if each.is_plain]
    assert len(set(scaled)) == len(scaled) > 5


def test_factors_are_around_the_needed_one() -> None:
    labels = {label_of(method) for method in candidates(ROTARY, 1024)}
    assert {"yarn(factor=4)", "yarn(factor=8)", "ntk(factor=4)", "ntk(factor=8)", "linear(factor=4)"} <= labels
    assert {"self_extend(group_size=6)", "self_extend(group_size=10)"} <= labels
    assert {"leaky_rerope(scaling_factor=6)", "leaky_rerope(scaling_factor=12)"} <= labels
    assert {"rerope", "rerope(window=128)", "dual_chunk", "streaming", "lm_infinite"} <= labels
    assert len(labels) <= 27, "three rounds of halving"


@pytest.mark.parametrize("window", [None, 64], ids=["full layers", "sliding layers"])
@pytest.mark.parametrize("length", [300, 1020, 1021, 4096, 50_000])
def test_groups_are_the_smallest_whose_distances_are_trained(length: int, window: int | None) -> None:
    """Counted position by position: the first key is the furthest one."""
    geometry = replace(ROTARY, window=window)
    for method, trained in zip(METHODS["self_extend"].candidates(geometry, length), (256, 170), strict=True):
        near = (window or 256) // 4
        furthest = [(length - 1) // group + near - near // group for group in range(1, 600)]
        smallest = next(group for group, distance in enumerate(furthest, 1) if distance < trained)
        assert method == parse({"method": "self_extend", "group_size": smallest})


@pytest.mark.parametrize("length", [257, 300, 448, 449, 1000, 1024, 4096, 10_000])
def test_the_first_proposal_of_a_method_reaches_the_length(length: int) -> None:
    """Groups and divisors are whole numbers: one less does not reach it."""
    for name, kind in METHODS.items():
        for method in kind.candidates(ROTARY, length)[:1]:
            reached = method.reached(ROTARY)
            assert reached is None or reached >= length, label_of(method)
            for field in {"group_size", "scaling_factor"} & kind.model_fields.keys():
                fewer = parse({"method": name, field: max(1, getattr(method, field) - 1)}).reached(ROTARY)
                assert fewer is not None
                assert fewer < length, label_of(method)


def test_a_table_or_sinusoids_are_stretched_as_far_as_needed() -> None:
    sinusoidal = replace(LEARNED, family="sinusoidal", native=parse("sinusoidal"), table_rows=None)
    for geometry, name in ((LEARNED, "learned_interpolation"), (sinusoidal, "sinusoidal_interpolation")):
        stretched = next(method for method in candidates(geometry, 1024) if method.method == name)
        assert (label_of(stretched), stretched.reached(geometry)) == (f"{name}(factor=4)", 1024)


def test_the_slopes_of_the_checkpoint_are_divided() -> None:
    divided = [method for method in candidates(ALIBI, 1024) if method.method == "alibi"]
    assert [(m.alibi_bias_max, m.slope_factor) for m in divided] == [(4.0, 4.0), (4.0, 2.0)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", ["bias", "relative", "none"])
def test_no_other_family_is_proposed(family: Family) -> None:
    geometry = replace(ROTARY, rotary_dim=0, family=family)
    assert {METHODS[method.method].family for method in candidates(geometry, 1024)[1:]} <= {family}


def test_lengths_beyond_every_factor_have_proposals() -> None:
    assert len(proposed_for(ROTARY, 1 << 24)) > 5


def test_the_same_proposal_for_another_length() -> None:
    assert alike(parse("yarn:8"), ROTARY, 1024, 512) == parse("yarn:4")
    assert alike(parse("self_extend:6"), ROTARY, 1024, 512) == METHODS["self_extend"].candidates(ROTARY, 512)[0]
    other = parse("yarn:3")
    assert alike(other, ROTARY, 1024, 512) is other
