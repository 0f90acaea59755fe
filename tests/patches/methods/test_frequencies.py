"""Frequencies, attention factor and base in effect against the papers' formulas, over many geometries."""

from __future__ import annotations

import itertools
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from patches import RopeGeometry, parse, resolve
from tests import oracles
from tests.methods import Fields, assume_in_reach, request_id, rows

GEOMETRIES = [  # head_dim, rotary_dim, rope_theta, trained length, max_position_embeddings
    (64, 64, 1e4, 256, 256),
    (128, 128, 1e4, 4096, 4096),
    (128, 128, 5e5, 8192, 131_072),
    (128, 128, 1e6, 32_768, 131_072),
    (64, 16, 1e4, 2048, 2048),
    (80, 32, 1e4, 2048, 2048),
    (16, 4, 1e4, 64, 64),
    (256, 256, 1e4, 8192, 8192),
]


def geometry(head_dim: int, rotary_dim: int, theta: float, trained: int, longest: int) -> RopeGeometry:
    return RopeGeometry(head_dim, rotary_dim, theta, trained, longest, num_attention_heads=4)


def tolerance(fields: Fields) -> float:
    """Relative. Blending ramps are float32. A narrow one magnifies the rounding of its ends. The part of a
    pair that is left is divided by the factor."""
    if fields.get("base"):
        return tolerance(fields["base"])
    blends = fields["method"] in ("yarn", "yarn_paper", "dynamic_yarn", "ntk_by_parts", "llama3")
    narrow = 10.0 if fields.get("truncate") is False else 1.0
    return 1e-6 + (2e-7 * narrow * float(fields.get("factor", 8.0)) if blends else 0.0)


def check(fields: Fields, model: RopeGeometry, length: int) -> None:
    resolved = resolve(parse(fields), model, length)
    sizes = oracles.Model(
        model.rope_theta, model.rotary_dim, model.original_max_position_embeddings, model.max_position_embeddings, 4
    )
    expected = oracles.encoding(fields, sizes, length)
    case = (request_id(fields), length)
    assert resolved.inv_freq == pytest.approx(expected.inv_freq, rel=tolerance(fields), abs=0), case
    assert resolved.attention_factor == pytest.approx(expected.attention_factor, rel=1e-9), case


@pytest.mark.parametrize("sizes", GEOMETRIES, ids=str)
def test_equals_the_paper_on_the_grid(sizes: Any) -> None:
    model = geometry(*sizes)
    trained = model.original_max_position_embeddings
    for row in rows(pairs=model.rotary_dim // 2, trained_length=trained):
        if row.whole_head and model.rotary_dim < model.head_dim:
            continue
        for fields in row.requests:
            for length in (1, trained // 2, trained // 2 + 1, trained, trained + 1, 4 * trained + 3):
                check(fields, model, length)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("name", ["yarn", "dynamic_yarn", "mrrope_uni", "mrrope_pro", "tailspline"])
def test_equal_turns_make_a_step(name: str, truncate: bool) -> None:
    """Kimi K2's YaRN. Rounded outwards, the step takes one pair."""
    fields = {"method": name, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": truncate}
    if name != "dynamic_yarn":
        fields["factor"] = 4.0
    for sizes in GEOMETRIES:
        model = geometry(*sizes)
        check(fields, model, 4 * model.original_max_position_embeddings)


@pytest.mark.parametrize("name", ["yarn", "dynamic_yarn", "mrrope_uni", "mrrope_pro", "tailspline"])
def test_a_range_that_no_pair_reaches_is_refused(name: str) -> None:
    """The released code keeps every pair there, whatever the factor."""
    fields = {"method": name, "truncate": False, "beta_fast": 64.0} | ({} if name == "dynamic_yarn" else {"factor": 4})
    model = geometry(*GEOMETRIES[0])
    check({**fields, "beta_slow": 40.7}, model, 1024)
    with pytest.raises(ValueError, match=r"^beta_slow: 40\.8 .* every pair makes fewer turns"):
        parse({**fields, "beta_slow": 40.8}).encoding(model)
    slowest = 256 / (2 * np.pi) * 1e4 ** (-62 / 64)
    check({**fields, "beta_fast": 1.01 * slowest, "beta_slow": 1e-4}, model, 1024)
    with pytest.raises(ValueError, match=r"^beta_fast: 0\.005\d+ .* every pair makes more turns"):
        parse({**fields, "beta_fast": 0.99 * slowest, "beta_slow": 1e-4}).encoding(model)


def test_gamma_of_ntk_by_parts_must_be_in_reach() -> None:
    model = geometry(*GEOMETRIES[0])
    with pytest.raises(ValueError, match=r"^gamma_1: 100 is out of reach"):
        parse({"method": "ntk_by_parts", "factor": 4, "gamma_1": 100.0, "gamma_0": 200.0}).encoding(model)
    check({"method": "ntk_by_parts", "factor": 4, "beta_1": 1e-5, "beta_0": 1e-4}, model, 1024)


@st.composite
def drawn_geometries(draw: st.DrawFn) -> RopeGeometry:
    head_dim = 2 * draw(st.integers(2, 128))
    rotary_dim = 2 * draw(st.integers(2, head_dim // 2))
    theta = 10 ** draw(st.floats(2.0, 7.0))
    trained = draw(st.integers(16, 1 << 18))
    return geometry(head_dim, rotary_dim, theta, trained, trained * draw(st.integers(1, 32)))


@st.composite
def drawn_requests(draw: st.DrawFn, pairs: int) -> Fields:
    factor = draw(st.floats(1.0, 64.0))
    slow = draw(st.floats(0.1, 8.0))
    fast = slow * draw(st.floats(2.0, 64.0))
    divisors = st.lists(st.floats(0.5, 64.0), min_size=pairs, max_size=pairs)
    requests: list[Fields] = [
        {"method": "default"},
        {"method": "linear", "factor": factor},
        {"method": "ntk", "factor": factor},
        {"method": "dynamic", "factor": factor},
        {"method": "ntk_by_parts", "factor": factor, "gamma_0": fast, "gamma_1": slow},
        {"method": "ntk_by_parts", "factor": factor, "beta_0": fast, "beta_1": slow},
        {"method": "yarn", "factor": factor, "beta_fast": fast, "beta_slow": slow, "truncate": draw(st.booleans())},
        {"method": "yarn", "factor": factor, "mscale": slow, "mscale_all_dim": min(fast, 100.0)},
        {"method": "yarn", "factor": factor, "attention_factor": slow},
        {"method": "llama3", "factor": factor, "low_freq_factor": slow, "high_freq_factor": fast},
        {"method": "longrope", "short_factor": draw(divisors), "long_factor": draw(divisors)},
        {"method": "dynamic_linear"},
        {"method": "dynamic_yarn", "beta_fast": fast, "beta_slow": slow},
        {"method": "yarn_paper", "factor": factor, "alpha": slow, "beta": fast},
        {"method": "ntk_fixed", "factor": factor},
        {"method": "ntk_mixed", "factor": factor, "b": draw(st.floats(0.0, 2.0))},
        *(
            {"method": name, "factor": factor, "beta_fast": fast, "beta_slow": slow, "truncate": truncate}
            for name in ("mrrope_uni", "mrrope_pro", "tailspline")
            for truncate in (True, False)
        ),
        {"method": "custom", "inv_freq": draw(st.lists(st.floats(0.0, 6.0, width=32), min_size=pairs, max_size=pairs))},
        {"method": "clipped_rope", "base": {"method": "linear", "factor": factor}, "n": draw(st.integers(2, pairs))},
    ]
    return draw(st.sampled_from(requests))


@given(st.data())
def test_equals_the_paper_on_drawn_geometries(data: st.DataObject) -> None:
    model = data.draw(drawn_geometries())
    fields = data.draw(drawn_requests(model.rotary_dim // 2))
    assume_in_reach(fields, model)
    length = data.draw(st.integers(1, 8 * model.original_max_position_embeddings))
    check(fields, model, length)


@pytest.mark.parametrize("factor", [1.0, 2.0, 8.0])
def test_ntk_keeps_the_first_pair_and_divides_the_last_by_the_factor(factor: float) -> None:
    model = geometry(64, 64, 1e4, 256, 256)
    plain = resolve(parse({"method": "default"}), model, 256)
    scaled = resolve(parse({"method": "ntk", "factor": factor}), model, 256)
    assert scaled.inv_freq[0] == plain.inv_freq[0] == 1.0
    assert scaled.inv_freq[-1] == pytest.approx(plain.inv_freq[-1] / factor, rel=1e-6)
    assert scaled.rope_theta == pytest.approx(oracles.ntk_base(1e4, 64, factor), rel=1e-12)


def test_dynamic_reports_the_base_of_its_reserved_length() -> None:
    model = geometry(64, 64, 1e4, 256, 256)
    method = parse({"method": "dynamic", "factor": 2.0})
    for length, scale in ((10, 1.0), (256, 1.0), (512, 3.0), (1024, 7.0)):
        resolved = resolve(method, model, length)
        assert resolved.rope_theta == pytest.approx(oracles.ntk_base(1e4, 64, scale), rel=1e-12)


RESONANCE_GRID = list(
    itertools.product((64, 128), (1e4, 5e5, 1e6, 1e7), (2.0, 4.0, 8.0, 16.0, 32.0), (256, 2048, 4096, 8192, 32_768))
)
"""d, base, factor, L0: 200 settings with 9,600 pairs."""


@pytest.mark.slow
@pytest.mark.parametrize("base", ["yarn", "linear", "ntk", "llama3", "ntk_by_parts", "yarn_paper", "ntk_mixed"])
def test_resonance_rounds_the_exact_wavelengths(base: str) -> None:
    """Rounding is a jump: frequencies that are float32 already put one wavelength in thirty on another integer."""
    pairs = 0
    for d, b, s, l0 in RESONANCE_GRID:
        fields: Fields = {"method": "resonance", "base": {"method": base, "factor": s}}
        resolved = resolve(parse(fields), geometry(d, d, b, l0, l0), l0)
        exact = oracles.encoding(fields, oracles.Model(b, d, l0, l0, 4), l0).inv_freq
        assert resolved.inv_freq == tuple(np.float32(exact).tolist()), (d, b, s, l0)
        pairs += len(exact)
    assert pairs == 9600


@given(drawn_geometries(), st.sampled_from(["default", "dynamic", "dynamic_yarn"]))
def test_resonance_rounds_every_wavelength_and_leaves_the_rest(model: RopeGeometry, base: str) -> None:
    length = 3 * model.original_max_position_embeddings
    assume_in_reach({"method": base}, model)
    plain = resolve(parse({"method": base}), model, length)
    fields: Fields = {"method": "resonance", "base": {"method": base}}
    rounded = resolve(parse(fields), model, length)
    sizes = oracles.Model(
        model.rope_theta, model.rotary_dim, model.original_max_position_embeddings, model.max_position_embeddings, 4
    )
    assert rounded.inv_freq == tuple(np.float32(oracles.encoding(fields, sizes, length).inv_freq).tolist())
    assert rounded.attention_factor == plain.attention_factor
    assert rounded.rope_theta == plain.rope_theta
    assert rounded.length == plain.length


@pytest.mark.parametrize("factor", [1.0, 4.0, 32.0])
def test_su_variants_meet_at_their_ends(factor: float) -> None:
    """b = 0 is interpolation and b = 1 the fixed form; every form divides the last pair by the whole factor."""
    model = geometry(64, 64, 1e4, 256, 256)

    def frequencies(**fields: Any) -> tuple[float, ...]:
        return resolve(parse({"factor": factor, **fields}), model, 256).inv_freq

    linear, fixed = frequencies(method="linear"), frequencies(method="ntk_fixed")
    assert frequencies(method="ntk_mixed", b=0.0) == pytest.approx(linear, rel=1e-6)
    assert frequencies(method="ntk_mixed", b=1.0) == fixed
    mixed = frequencies(method="ntk_mixed")
    assert mixed[-1] == pytest.approx(linear[-1], rel=1e-6)
    assert fixed[-1] == pytest.approx(linear[-1], rel=1e-6)
    assert all(a <= b <= c * (1 + 1e-6) for a, b, c in zip(linear, mixed, fixed, strict=True))


@pytest.mark.parametrize("name", ["mrrope_uni", "mrrope_pro", "tailspline"])
def test_radix_methods_keep_fast_pairs_and_divide_slow_ones(name: str) -> None:
    """Llama-2-7B: pairs 20 to 46 are YaRN's range."""
    model = geometry(128, 128, 1e4, 4096, 4096)
    plain = resolve(parse({"method": "default"}), model, 1).inv_freq
    scaled = resolve(parse({"method": name, "factor": 8.0}), model, 1).inv_freq
    divided = [a / b for a, b in zip(plain, scaled, strict=True)]
    assert divided[:21] == [1.0] * 21
    assert divided[46:] == pytest.approx([8.0] * 18, rel=1e-6)
    assert all(a < b for a, b in pairwise(divided[20:47]))


@pytest.mark.parametrize("hard", [False, True])
def test_clipping_wraps_what_it_is_given(hard: bool) -> None:
    model = geometry(128, 128, 1e4, 256, 256)
    base = {"method": "dynamic_yarn"}
    plain = resolve(parse(base), model, 1000)
    clipped = resolve(parse({"method": "clipped_rope", "base": base, "hard": hard}), model, 1000)
    assert clipped.inv_freq[:44] == plain.inv_freq[:44]
    assert clipped.inv_freq[-1] == 0.0
    assert (clipped.inv_freq[44] == 0.0) is hard
    assert (clipped.attention_factor, clipped.length) == (plain.attention_factor, 1000)


def test_llama3_is_the_ramp_by_turns_of_the_yarn_paper() -> None:
    """YaRN, equations 18 and 19: gamma is linear in turns; with alpha 1 and beta 4 that is Llama 3's rule."""
    model = geometry(128, 128, 5e5, 8192, 8192)
    resolved = resolve(parse({"method": "llama3", "factor": 8.0}), model, 8192)
    paper = resolve(parse({"method": "yarn_paper", "factor": 8.0, "alpha": 1.0, "beta": 4.0}), model, 8192)
    assert paper.inv_freq == pytest.approx(resolved.inv_freq, rel=2e-6)
    for f, plain in zip(resolved.inv_freq, oracles.default(5e5, 128), strict=True):
        turns = 8192 * plain / (2 * 3.141592653589793)
        gamma = min(1.0, max(0.0, (turns - 1) / (4 - 1)))
        assert f == pytest.approx(plain * gamma + plain / 8 * (1 - gamma), rel=2e-6)


def test_unscaled_frequencies_do_not_depend_on_head_dim() -> None:
    """Partial rotary: the exponent counts in rotated dimensions."""
    narrow = resolve(parse({"method": "default"}), geometry(16, 16, 1e4, 256, 256), 1)
    partial = resolve(parse({"method": "default"}), geometry(64, 16, 1e4, 256, 256), 1)
    assert narrow.inv_freq == partial.inv_freq
