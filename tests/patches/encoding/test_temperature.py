"""Attention temperature: every kind against the papers and the golden file, alone and on every method."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from patches import InvalidEncoding, ResolvedRecipe, RopeGeometry, parse, resolve
from patches.encoding.rotary import rotary_table, rotate
from patches.encoding.temperature import (
    ConstantTemperature,
    FloorLogTemperature,
    LogLengthTemperature,
    LogRatioTemperature,
    ReservedLengthTemperature,
)
from tests import oracles
from tests.methods import ROWS, Fields, Row

TRAINED = 256
GEOMETRY = RopeGeometry(64, 64, 10_000.0, TRAINED, TRAINED, num_attention_heads=4)
PARTIAL = replace(GEOMETRY, rotary_dim=16)


def tempered(asked: Any, *, length: int = 1, geometry: RopeGeometry = GEOMETRY) -> ResolvedRecipe:
    """ "default" under a temperature."""
    return resolve(parse({"method": "default", "attention_temperature": asked}), geometry, length)


def multipliers(asked: Any, positions: list[int], *, length: int = 1, trained: int = TRAINED) -> list[float]:
    geometry = replace(GEOMETRY, original_max_position_embeddings=trained)
    temperature = tempered(asked, length=length, geometry=geometry).recipe.attention_temperature
    assert temperature is not None
    values = temperature(torch.tensor(positions))
    assert values.dtype == torch.float32
    return list(values.tolist())


# Values


def golden_cases(golden: dict[str, Any]) -> dict[str, Fields]:
    """Series of the golden file, one value per position -> the request that computes it."""
    return {
        "logn_query_L4096": {"kind": "log_n", "length": 4096},
        "logn_query_L2048": {"kind": "log_n", "length": 2048},
        "llama4_query_coef0.1_floor8192": {"kind": "floor_log", "beta": 0.1, "length": 8192, "offset": 1},
        "ministral3_query_beta0.1_L16384": {"kind": "floor_log", "beta": 0.1, "length": 16384},
    }


def test_golden_values(shared: Path) -> None:
    golden = json.loads((shared / "golden" / "attention_temperature.json").read_text())
    positions = golden.pop("positions")
    for name, asked in golden_cases(golden).items():
        assert multipliers(asked, positions) == pytest.approx(golden.pop(name), rel=3e-7), name

    by_length = golden.pop("qwen_dca_m_L32768 (n = position+1; logits get m^2)")
    for position, m in zip(positions, by_length, strict=True):
        asked = {"kind": "reserved_length", "length": 32768}
        assert multipliers(asked, [0], length=position + 1) == pytest.approx([m**2], rel=3e-7)

    for s, m in golden.pop("yarn_mscale(s); logits get mscale^2").items():
        if float(s) >= 1:
            assert multipliers({"kind": "yarn", "factor": float(s)}, [7]) == pytest.approx([m**2], rel=3e-7)
    for s, m in golden.pop("chunkllama_mscale(s)=0.05 ln s+1").items():
        assert multipliers({"kind": "chunk_llama", "factor": float(s)}, [7]) == pytest.approx([m**2], rel=3e-7)
    for sizes, factor in golden.pop("longrope_attention_factor(s,L0)").items():
        s, l0 = map(int, sizes.split(","))
        asked = {"kind": "longrope", "factor": float(s), "length": l0}
        assert multipliers(asked, [7]) == pytest.approx([factor**2], rel=3e-7)
        assert tempered({**asked, "rotated_only": True}).attention_factor == pytest.approx(factor, rel=1e-7)
    assert golden == {}, "a series of the golden file that nothing here compares"


factors, lengths, positions = st.floats(1.0, 4096.0), st.integers(2, 1 << 20), st.integers(0, (1 << 24) - 2)
KINDS = st.one_of(
    st.floats(0.01, 10.0),
    st.sampled_from(["log_n", "floor_log", "reserved_length"]),
    st.fixed_dictionaries({"kind": st.just("constant"), "multiplier": st.floats(0.01, 10.0)}),
    st.fixed_dictionaries({"kind": st.sampled_from(["yarn", "chunk_llama", "longrope"]), "factor": factors}),
    st.fixed_dictionaries({"kind": st.just("longrope"), "factor": factors, "length": lengths}),
    st.fixed_dictionaries({"kind": st.sampled_from(["log_n", "floor_log", "reserved_length"]), "length": lengths}),
    st.fixed_dictionaries(
        {"kind": st.just("floor_log"), "beta": st.floats(0.0, 10.0), "length": lengths, "offset": st.integers(0, 1)}
    ),
)


@given(KINDS, positions, lengths, lengths)
def test_every_kind_is_what_the_papers_say(asked: Any, position: int, length: int, trained: int) -> None:
    expected = oracles.temperature(asked, trained, length)(position)
    assert multipliers(asked, [position], length=length, trained=trained) == pytest.approx([expected], rel=1e-6)


@given(st.integers(2, 5_000), st.integers(1, 3_000), st.integers(0, 1))
def test_steps_of_floor_log_are_exact(length: int, step: int, offset: int) -> None:
    """The multiplier rises at the position that completes a step and not one earlier, whatever the division rounds."""
    first = length * step - offset
    before, after = multipliers({"kind": "floor_log", "length": length, "offset": offset}, [first - 1, first])
    assert before == pytest.approx(1 + 0.1 * math.log(step), rel=1e-6)
    assert after == pytest.approx(1 + 0.1 * math.log(step + 1), rel=1e-6)
    assert after > before


def test_ministral3_as_in_transformers() -> None:
    position = torch.arange(0, 100_000, 97)
    expected = get_llama_4_attn_scale(position[None], 0.1, 16384).flatten()
    asked = {"kind": "floor_log", "beta": 0.1, "length": 16384}
    assert multipliers(asked, position.tolist()) == pytest.approx(expected.tolist(), rel=1e-6)


def test_the_temperature_of_inkling_is_one_up_to_its_length() -> None:
    found = LogRatioTemperature(0.3, 50)(torch.tensor([0, 49, 50, 99, 4_999])).tolist()
    assert found == pytest.approx([1.0, 1.0, *(1 + 0.3 * math.log(n / 50) for n in (51, 100, 5_000))], rel=1e-6)


# On every method


def with_temperature(row: Row, asked: Any) -> Fields:
    """The row's easy request, asking for a temperature; DroPE without the factor that sets one."""
    easy = {} if row.name == "drope" else row.easy
    return {"method": row.name, **easy, "attention_temperature": asked}


ASKED_AND_EXPECTED: list[tuple[Any, Any]] = [
    (1.4, ConstantTemperature(1.4)),
    ({"kind": "yarn", "factor": math.e}, ConstantTemperature(1.1**2)),
    ("log_n", LogLengthTemperature(TRAINED)),
    ({"kind": "floor_log", "beta": 0.2, "length": 64}, FloorLogTemperature(0.2, 64, 0)),
    ({"kind": "reserved_length", "length": 100}, ConstantTemperature((0.1 * math.log(10) + 1) ** 2)),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_method_takes_a_temperature(row: Row) -> None:
    for asked, expected in ASKED_AND_EXPECTED:
        fields = with_temperature(row, asked)
        without = resolve(parse({**fields, "attention_temperature": None}), GEOMETRY, 1000)
        resolved = resolve(parse(fields), GEOMETRY, 1000)
        found = resolved.recipe.attention_temperature
        if isinstance(expected, ConstantTemperature):
            assert isinstance(found, ConstantTemperature), asked
            assert found.multiplier == pytest.approx(expected.multiplier, rel=1e-12)
        else:
            assert found == expected
        assert resolved != without, asked
        assert replace(resolved, recipe=replace(resolved.recipe, attention_temperature=None)) == without, asked


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_scaling_the_rotated_part_needs_rotation(row: Row) -> None:
    method = parse(with_temperature(row, {"kind": "constant", "multiplier": 1.44, "rotated_only": True}))
    if not row.rotates:
        with pytest.raises(ValueError, match=r"^attention_temperature: rotated_only"):
            resolve(method, GEOMETRY, 1000)
        return
    without = resolve(parse({"method": row.name, **row.easy}), GEOMETRY, 1000)
    resolved = resolve(method, GEOMETRY, 1000)
    assert resolved.recipe.attention_temperature is None
    assert resolved.attention_factor == pytest.approx(1.2 * without.attention_factor)
    assert resolved.inv_freq == without.inv_freq
    assert resolved.recipe.depends_on_length == without.recipe.depends_on_length


def score(resolved: ResolvedRecipe, q: torch.Tensor, k: torch.Tensor, m: int, n: int) -> float:
    """q at position m against k at n, float64 apart from the frequencies."""
    inv_freq = torch.tensor(resolved.inv_freq, dtype=torch.float64)
    turned = [
        rotate(x[None], *rotary_table(torch.tensor([at]), inv_freq, resolved.attention_factor, interleaved=False),
               interleaved=False)[0]
        for x, at in ((q, m), (k, n))
    ]  # fmt: skip
    product = float(turned[0] @ turned[1])
    temperature = resolved.recipe.attention_temperature
    return product if temperature is None else product * float(temperature(torch.tensor([m])))


@pytest.mark.parametrize(
    "asked",
    [
        {"kind": "constant", "multiplier": 1.7},
        {"kind": "yarn", "factor": 8.0},
        {"kind": "chunk_llama", "factor": 8.0},
        {"kind": "longrope", "factor": 8.0},
    ],
    ids=lambda asked: asked["kind"],
)
def test_the_rotated_part_is_the_whole_where_all_rotates(asked: Fields) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 64, dtype=torch.float64, generator=generator)
    for geometry in (GEOMETRY, PARTIAL):
        whole, rotated = (
            tempered(asked, geometry=geometry),
            tempered({**asked, "rotated_only": True}, geometry=geometry),
        )
        one, other = score(whole, q, k, 50, 3), score(rotated, q, k, 50, 3)
        assert (one == pytest.approx(other, rel=1e-6)) == (geometry is GEOMETRY)
        plain = score(resolve(parse({"method": "default"}), geometry, 1), q, k, 50, 3)
        m = oracles.temperature(asked, TRAINED, 1)(50)
        assert one == pytest.approx(m * plain, rel=1e-6)
        kept = float(q[geometry.rotary_dim :] @ k[geometry.rotary_dim :])
        assert other == pytest.approx(m * (plain - kept) + kept, rel=1e-6)


def test_yarns_temperature_is_a_factor_on_cos_and_sin() -> None:
    yarn = resolve(parse({"method": "yarn", "factor": 4.0}), PARTIAL, 1)
    plain = {"method": "yarn", "factor": 4.0, "attention_factor": 1.0}
    asked = {"kind": "yarn", "factor": 4.0, "rotated_only": True}
    again = resolve(parse({**plain, "attention_temperature": asked}), PARTIAL, 1)
    assert again.attention_factor == pytest.approx(yarn.attention_factor, rel=1e-7)
    assert again.inv_freq == yarn.inv_freq


# Lengths


def test_lengths_default_to_the_trained_length_that_the_request_states() -> None:
    for name in ("log_n", "floor_log", "reserved_length"):
        for fields in ({"method": "yarn", "factor": 2.0}, {"method": "self_extend"}):
            stated = {**fields, "original_max_position_embeddings": 64, "attention_temperature": name}
            explicit = {**stated, "attention_temperature": {"kind": name, "length": 64}}
            other = {**stated, "attention_temperature": {"kind": name, "length": 65}}
            assert parse(stated).recipe(GEOMETRY) == parse(explicit).recipe(GEOMETRY) != parse(other).recipe(GEOMETRY)
            assert parse(stated).parameters(GEOMETRY)["attention_temperature"]["length"] == 64
        plain = parse({"method": "none", "attention_temperature": name})
        assert plain.parameters(GEOMETRY)["attention_temperature"]["length"] == TRAINED


def test_a_temperature_by_reserved_length_is_fixed_when_resolved() -> None:
    recipe = parse({"method": "default", "attention_temperature": "reserved_length"}).recipe(GEOMETRY)
    assert recipe.depends_on_length
    short, trained, long = (recipe.resolve(GEOMETRY, n) for n in (1, TRAINED, 4 * TRAINED))
    assert short == trained != long
    assert short.recipe.attention_temperature == ConstantTemperature(1.0)
    assert long.length == 4 * TRAINED
    with pytest.raises(TypeError, match="reserved"):
        ReservedLengthTemperature(TRAINED)(torch.tensor([1]))


def test_a_request_replaces_the_temperature_of_the_checkpoint() -> None:
    native = parse({"method": "yarn", "factor": 4.0, "attention_temperature": {"kind": "floor_log", "length": 64}})
    declares = replace(GEOMETRY, native=native)
    for asked in (1.3, {"kind": "constant", "multiplier": 1.3, "rotated_only": True}):
        found = tempered(asked, geometry=declares).recipe.attention_temperature
        assert found == (ConstantTemperature(1.3) if asked == 1.3 else None)
    own = resolve(parse({"method": "default"}), declares, 1).recipe.attention_temperature
    assert own == FloorLogTemperature(0.1, 64, 0)


def test_a_request_multiplies_beside_a_factor_on_cos_and_sin_and_replaces_a_temperature() -> None:
    """As docs/methods.md says: YaRN keeps its factor, and DeepSeek's form of YaRN loses its temperature."""

    def under(fields: Fields, **asked: Any) -> ResolvedRecipe:
        return resolve(parse({"method": "yarn", "factor": 4.0, **fields, **asked}), replace(PARTIAL, latent=True), 1)

    assert under({}, attention_temperature=1.0).attention_factor == under({}).attention_factor > 1.0
    deepseek = {"mscale": 1.0, "mscale_all_dim": 1.0}
    own, replaced = under(deepseek), under(deepseek, attention_temperature=1.0)
    assert own.recipe.attention_temperature != replaced.recipe.attention_temperature == ConstantTemperature(1.0)


# Requests


@pytest.mark.parametrize(
    ("short", "long"),
    [
        (1.5, {"kind": "constant", "multiplier": 1.5, "rotated_only": False}),
        (2, {"kind": "constant", "multiplier": 2.0}),
        ("log_n", {"kind": "log_n"}),
        ("floor_log", {"kind": "floor_log", "beta": 0.1, "offset": 0}),
        ("reserved_length", {"kind": "reserved_length", "length": None}),
    ],
)
def test_short_forms(short: Any, long: Fields) -> None:
    asked = parse({"method": "none", "attention_temperature": short})
    assert asked == parse({"method": "none", "attention_temperature": long})
    echo = json.loads(json.dumps(asked.parameters(GEOMETRY)))["attention_temperature"]
    assert parse({"method": "none", "attention_temperature": echo}).recipe(GEOMETRY) == asked.recipe(GEOMETRY)
    asked_again = parse({"method": "none", "attention_temperature": echo})
    assert asked_again.parameters(GEOMETRY)["attention_temperature"] == echo


@pytest.mark.parametrize(
    "asked",
    [
        0.0, -1.0, 10.1, math.nan, math.inf, 10**400, True, False, "", "1.5", "LOG_N", "yarn", "constant", [], {},
        [1.5],
        {"multiplier": 1.5},
        {"kind": "log"},
        {"kind": "constant"},
        {"kind": "constant", "multiplier": "1.5"},
        {"kind": "constant", "multiplier": 1.5, "rotated_only": 1},
        {"kind": "constant", "multiplier": 1.5, "length": 64},
        {"kind": "yarn", "factor": 0.5},
        {"kind": "yarn", "factor": 2.0, "length": 64},
        {"kind": "chunk_llama"},
        {"kind": "longrope", "length": 64},
        {"kind": "log_n", "length": 1},
        {"kind": "log_n", "rotated_only": True},
        {"kind": "floor_log", "beta": -0.1},
        {"kind": "floor_log", "offset": 2},
        {"kind": "reserved_length", "length": 0},
    ],
    ids=lambda asked: str(asked)[:40],
)  # fmt: skip
def test_refused(asked: Any) -> None:
    with pytest.raises(InvalidEncoding) as caught:
        parse({"method": "default", "attention_temperature": asked})
    assert all(problem.field.startswith("attention_temperature") for problem in caught.value.problems)


def test_given_once_with_a_base() -> None:
    base = {"method": "yarn", "factor": 2.0, "attention_temperature": 1.3}
    with pytest.raises(InvalidEncoding, match=r"attention_temperature: given here and in base"):
        parse({"method": "self_extend", "base": base, "attention_temperature": "log_n"})
    inside = resolve(parse({"method": "self_extend", "base": base}), GEOMETRY, 100)
    assert inside.recipe.attention_temperature == ConstantTemperature(1.3)
    del base["attention_temperature"]
    outside = resolve(parse({"method": "self_extend", "base": base, "attention_temperature": 1.3}), GEOMETRY, 100)
    assert inside == outside
