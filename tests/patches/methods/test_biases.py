"""Biases on distance: values against the papers, the golden files and transformers, and what must hold of them."""

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
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom_alibi
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_alibi
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor as mpt_alibi
from transformers.models.t5.modeling_t5 import T5Attention

from patches import InvalidEncoding, RopeGeometry, parse, resolve
from patches.encoding.biases import t5_buckets
from patches.encoding.temperature import ConstantTemperature
from patches.methods.biases.sandwich import _Tables
from tests import oracles
from tests.methods import Fields, learned, request_id, rows

TRAINED = 256
GEOMETRY = RopeGeometry(64, 64, 10_000.0, TRAINED, TRAINED, num_attention_heads=4)
BIASES = ("alibi", "sandwich", "kerple_log", "kerple_power", "t5_bias")


def requests(heads: int) -> list[Fields]:
    return [fields for row in rows(32, TRAINED, heads) if row.name in BIASES for fields in row.requests]


def bias(
    fields: Fields,
    q_idx: torch.Tensor,
    kv_idx: torch.Tensor,
    *,
    heads: int = 4,
    length: int = TRAINED,
    geometry: RopeGeometry = GEOMETRY,
) -> torch.Tensor:
    """[heads, q, k] for index vectors q_idx [q] and kv_idx [k]."""
    geometry = replace(geometry, num_attention_heads=heads)
    score_bias = resolve(parse(fields), geometry, length).recipe.score_bias
    assert score_bias is not None
    result = score_bias(q_idx[:, None], kv_idx[None])
    assert result.shape == (heads, len(q_idx), len(kv_idx))
    assert result.dtype == torch.float32
    return result


def weights(scores: torch.Tensor) -> torch.Tensor:
    """Softmax over causal pairs, in float64."""
    return torch.softmax(scores.double().masked_fill(~torch.ones_like(scores[0]).tril().bool(), -math.inf), dim=-1)


# Values


@pytest.mark.parametrize("heads", [1, 4, 6, 12])
@pytest.mark.parametrize("index", range(len(requests(1))), ids=[request_id(fields) for fields in requests(1)])
def test_every_bias_equals_the_paper(index: int, heads: int) -> None:
    fields, length = requests(heads)[index], 3 * TRAINED
    model = oracles.Model(1e4, 64, TRAINED, TRAINED, heads)
    expected = oracles.encoding(fields, model, length).bias
    assert expected is not None
    query, key = torch.tensor([0, 1, 7, 300, 5_000]), torch.tensor([0, 1, 2, 7, 8, 31, 255, 300, 4_999, 5_000])
    result = bias(fields, query, key, heads=heads, length=length)
    for head in range(heads):
        for m, row in zip(query.tolist(), result[head], strict=True):
            for n, value in zip(key.tolist(), row.tolist(), strict=True):
                if n <= m:
                    assert value == pytest.approx(expected(head, m, n), rel=2e-6, abs=2e-5), (head, m, n)


@pytest.mark.parametrize("dim", [2, 34, 128, 512])
def test_sandwich_is_the_papers_at_every_distance(dim: int) -> None:
    """From a table, as a query meets all keys, and from the embeddings themselves, as scattered pairs do."""
    far = (1 << 20) + 12_345
    query, keys = torch.tensor([far]), torch.arange(far + 1)
    row = bias({"method": "sandwich", "dim": dim}, query, keys)[:, 0]
    places = torch.tensor([far - n for n in (0, 1, 2, 63, 64, 4_095, 4_096, 65_537, 1_000_003, far)])
    scattered = bias({"method": "sandwich", "dim": dim}, query, places)[:, 0]
    for head in range(4):
        expected = [oracles.biases.sandwich(far - n, head, 4, dim) for n in places.tolist()]
        assert row[head, places].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)
        assert scattered[head].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_sandwich_is_no_wider_than_four_times_the_papers() -> None:
    with pytest.raises(ValueError, match=r"dim: .*512"):
        parse({"method": "sandwich", "dim": 514})


def test_tables_of_products_are_kept_by_their_size() -> None:
    tables = _Tables(most_bytes=3 * 4 * 4096)
    cpu = torch.device("cpu")
    kept = [tables.at_least(100, dim, cpu) for dim in (2, 4, 6)]
    assert [tables.at_least(4096, dim, cpu) for dim in (6, 4, 2)] == kept[::-1], "none has pushed out another"
    tables.at_least(10, 8, cpu)
    assert tables.at_least(10, 2, cpu) is kept[0]
    assert tables.at_least(10, 6, cpu) is not kept[2], "the one used longest ago has gone"
    longer = tables.at_least(4097, 6, cpu)
    assert len(longer) == 8192
    assert tables.at_least(10, 6, cpu) is longer
    assert tables.at_least(1 << 20, 6, cpu) is tables.at_least(1, 6, cpu), "what is in use stays, whatever its size"


def test_t5_buckets_of_the_golden_file(shared: Path) -> None:
    golden = json.loads((shared / "golden" / "t5_buckets.json").read_text())
    distance = [-relative for relative in golden["rel"] if relative <= 0]
    buckets = [b for relative, b in zip(golden["rel"], golden["causal_32_128"], strict=True) if relative <= 0]
    assert len(distance) == 301
    assert t5_buckets(torch.tensor(distance), 32, 128).tolist() == buckets
    assert [oracles.t5_bucket(n) for n in distance] == buckets


@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (32, 64), (64, 2048), (4, 3), (16, 40)])
def test_t5_buckets_are_those_of_transformers(buckets: int, farthest: int) -> None:
    """Also where a bucket begins at a whole distance, so that rounding decides (32 buckets, 64)."""
    distance = torch.arange(3 * farthest)
    expected = T5Attention._relative_position_bucket(-distance, False, buckets, farthest)
    assert torch.equal(t5_buckets(distance, buckets, farthest), expected)


# Native checkpoints


@pytest.mark.parametrize("heads", [4, 12, 32, 71])
def test_falcons_alibi_to_the_bit(heads: int) -> None:
    """Rounded slopes times rounded key positions, past the 256 that bfloat16 counts exactly."""
    fields: Fields = {"method": "alibi", "bias_dtype": "bfloat16", "scaled": True}
    expected = falcon_alibi(torch.ones(1, 2000, dtype=torch.long), heads, torch.float32) / 64**0.5
    for last in (0, 700, 1999):
        result = bias(fields, torch.tensor([last]), torch.arange(last + 1), heads=heads)
        assert torch.equal(result[:, 0], expected[:, 0, : last + 1])
    # A standard kernel, slopes and products in float32 and nothing scaled, is another model.
    assert (
        bias({"method": "alibi"}, torch.tensor([1999]), torch.arange(2000), heads=heads)[:, 0] - expected[:, 0]
    ).diff(dim=-1).abs().max() > 0.1


@pytest.mark.parametrize("heads", [4, 12, 16, 71])
@pytest.mark.parametrize(("family", "bias_max"), [("bloom", 8.0), ("mpt", 8.0), ("mpt", 16.0)])
def test_alibi_of_released_models(family: str, bias_max: float, heads: int) -> None:
    n = torch.arange(200)
    result = bias({"method": "alibi", "alibi_bias_max": bias_max}, n, n, heads=heads)
    if family == "bloom":
        expected = bloom_alibi(torch.ones(1, 200), heads, torch.float32)
    else:
        expected = mpt_alibi(heads, 200, alibi_bias_max=bias_max)
    torch.testing.assert_close(weights(result), weights(expected.expand(heads, 200, 200)), rtol=1e-4, atol=1e-7)


def test_t5_values_come_from_the_request_or_the_checkpoint() -> None:
    table = learned(32, 4)
    native = parse({"method": "t5_bias", "relative_attention_bias": table})
    declares = replace(GEOMETRY, family="bias", native=native)
    own = resolve(parse({"method": "t5_bias"}), declares, 10)
    assert own == resolve(native, GEOMETRY, 10) == resolve(parse({"method": "default"}), declares, 10)
    assert (
        parse({"method": "t5_bias"}).parameters(declares)["relative_attention_bias"]
        == native.model_dump()["relative_attention_bias"]
    )
    farther = parse({"method": "t5_bias", "relative_attention_max_distance": 64})
    assert resolve(farther, declares, 10) != own, "the checkpoint's values, other buckets"
    for geometry in (GEOMETRY, replace(GEOMETRY, native=parse({"method": "alibi"}), family="bias")):
        with pytest.raises(ValueError, match=r"^relative_attention_bias: missing"):
            resolve(parse({"method": "t5_bias"}), geometry, 10)
        with pytest.raises(ValueError, match=r"^relative_attention_bias: missing"):
            parse({"method": "t5_bias"}).parameters(geometry)
    with pytest.raises(ValueError, match=r"^relative_attention_num_buckets: .*\b32"):
        resolve(parse({"method": "t5_bias", "relative_attention_num_buckets": 16}), declares, 10)


# Properties


@given(st.sampled_from([1, 3, 4, 8, 12]), st.integers(1, 60), st.integers(0, 3_000))
def test_the_key_index_form_of_alibi_is_its_distance_form(heads: int, tokens: int, start: int) -> None:
    n = torch.arange(start, start + tokens)
    by_key = torch.tensor(oracles.alibi_slopes(heads))[:, None, None] * n.float().expand(1, tokens, tokens)
    torch.testing.assert_close(
        weights(bias({"method": "alibi"}, n, n, heads=heads)), weights(by_key), rtol=0, atol=1e-3
    )
    exact = torch.tensor(oracles.alibi_slopes(heads), dtype=torch.float64)[:, None, None] * n.double()
    expected = weights(exact.expand(heads, tokens, tokens))
    torch.testing.assert_close(weights(bias({"method": "alibi"}, n, n, heads=heads)), expected, rtol=0, atol=1e-6)


@given(st.integers(1, 4_000), st.integers(0, len(requests(4)) - 1))
def test_a_decode_step_has_the_bias_of_its_row(position: int, index: int) -> None:
    """One query and positions counted from 0 would make it 0, or that of another row."""
    fields = requests(4)[index]
    keys = torch.arange(position + 1)
    step = bias(fields, keys[-1:], keys)
    assert (step[:, 0, 0] != step[:, 0, -1]).all()
    both = bias(fields, keys[-2:], keys)
    torch.testing.assert_close(step, both[:, 1:], rtol=0, atol=0)


FALLING: list[Fields] = [
    *[fields for fields in requests(4) if fields["method"] in ("alibi", "kerple_log", "kerple_power")],
    {"method": "kerple_log", "r1": 0.01, "r2": 1e-3},
    {"method": "kerple_power", "r1": 1.0, "r2": 2.0},
]


@given(st.sampled_from(FALLING), st.lists(st.integers(0, 50_000), min_size=2, max_size=8))
def test_the_bias_falls_with_the_distance(fields: Fields, keys: list[int]) -> None:
    kv_idx = torch.tensor(sorted(keys))
    result = bias(fields, torch.tensor([50_000]), kv_idx)
    assert (result.diff(dim=-1) >= 0).all()
    if kv_idx[-1] - kv_idx[0] > 500:
        assert (result[..., -1] > result[..., 0]).all()


@pytest.mark.parametrize("fields", requests(4), ids=request_id)
def test_distance_alone_decides_unless_rounded(fields: Fields) -> None:
    n = torch.arange(100)
    here, there = bias(fields, n, n), bias(fields, n + 900, n + 900)
    moved = not torch.equal(here.tril(), there.tril())
    assert moved == (fields.get("bias_dtype") == "bfloat16")


@given(st.sampled_from([f for f in requests(4) if f["method"] != "t5_bias"]), st.integers(0, 2_000))
def test_no_bias_is_largest_elsewhere_than_at_the_query_itself(fields: Fields, position: int) -> None:
    result = bias(fields, torch.tensor([position]), torch.arange(position + 1))
    assert (result[..., -1:] >= result).all()


@given(st.floats(1.0, 4096.0), st.integers(2, 100_000))
def test_slope_factors(factor: float, length: int) -> None:
    n = torch.arange(0, 300, 7)
    plain = bias({"method": "alibi"}, n, n)
    assert torch.equal(bias({"method": "alibi", "slope_factor": 1.0}, n, n), plain)
    static = bias({"method": "alibi", "slope_factor": factor}, n, n)
    torch.testing.assert_close(static, plain / factor, rtol=1e-6, atol=0)
    dynamic = bias({"method": "alibi", "slope_factor": "dynamic"}, n, n, length=length)
    torch.testing.assert_close(dynamic, plain / max(1.0, length / TRAINED), rtol=1e-6, atol=0)
    if length <= TRAINED:
        assert torch.equal(dynamic, plain)
    other = {"method": "alibi", "slope_factor": "dynamic", "original_max_position_embeddings": 2 * TRAINED}
    doubled = bias(other, n, n, length=2 * length)
    torch.testing.assert_close(doubled, dynamic, rtol=1e-6, atol=0)


def test_alibi_is_the_power_kernel_with_exponent_one() -> None:
    n = torch.arange(50)
    power: Fields = {"method": "kerple_power", "r1": oracles.alibi_slopes(4), "r2": 1.0}
    alibi = bias({"method": "alibi"}, n, n)
    torch.testing.assert_close(bias(power, n, n).tril(), alibi.tril())
    assert not torch.allclose(bias({**power, "r2": 0.9}, n, n).tril(), alibi.tril())


def test_one_number_stands_for_every_head() -> None:
    for name in ("kerple_log", "kerple_power"):
        one = parse({"method": name, "r1": 0.7, "r2": 1.5}).recipe(GEOMETRY)
        assert one == parse({"method": name, "r1": [0.7] * 4, "r2": [1.5] * 4}).recipe(GEOMETRY)


@pytest.mark.parametrize("fields", [*requests(4), {"method": "alibi", "bias_dtype": "bfloat16"}], ids=request_id)
def test_a_rank_has_the_biases_of_its_heads(fields: Fields) -> None:
    """As with every head, whatever the formula makes of the number of heads."""
    resolved, n = resolve(parse(fields), GEOMETRY, 3 * TRAINED), torch.arange(0, 300, 7)
    whole = bias(fields, n, n, length=3 * TRAINED)
    for heads in (slice(0, 1), slice(1, 3), slice(2, 4)):
        part = resolved.of_heads(heads)
        assert part.recipe.score_bias is not None
        assert torch.equal(part.recipe.score_bias(n[:, None], n[None]), whole[heads])
        assert replace(part, recipe=resolved.recipe) == resolved, "nothing else changes"
    plain = resolve(parse("yarn:4"), GEOMETRY, TRAINED)
    assert plain.of_heads(slice(1, 3)) == plain


# DroPE


def test_drope_is_a_temperature_on_nothing_rotated() -> None:
    assert parse({"method": "drope"}).recipe(GEOMETRY) == parse({"method": "none"}).recipe(GEOMETRY)
    recipe = parse({"method": "drope", "factor": 8.0}).recipe(GEOMETRY)
    assert recipe.attention_temperature == ConstantTemperature(1 + 0.41 * math.log(8.0))
    assert recipe.schedule is None
    tempered = parse({"method": "drope", "attention_temperature": 1.3}).recipe(GEOMETRY)
    assert tempered.attention_temperature == ConstantTemperature(1.3)
    recalibrated = replace(GEOMETRY, family="none", native=parse({"method": "drope"}))
    assert not resolve(parse({"method": "default"}), recalibrated, 10).rotates


# Refused


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"method": "alibi", "slope_factor": 0.5}, "slope_factor"),
        ({"method": "alibi", "slope_factor": "linear"}, "slope_factor"),
        ({"method": "alibi", "slope_factor": 2.0, "original_max_position_embeddings": 64}, "original_max_position"),
        ({"method": "alibi", "original_max_position_embeddings": 64}, "original_max_position"),
        ({"method": "alibi", "bias_dtype": "float16"}, "bias_dtype"),
        ({"method": "alibi", "scaled": 1}, "scaled"),
        ({"method": "sandwich", "dim": 127}, "dim"),
        ({"method": "sandwich", "dim": 0}, "dim"),
        ({"method": "kerple_log", "r1": 0.0}, "r1"),
        ({"method": "kerple_log", "r2": -1.0}, "r2"),
        ({"method": "kerple_log", "r1": []}, "r1"),
        ({"method": "kerple_log", "r1": [1.0, math.nan]}, "r1"),
        ({"method": "kerple_power", "r2": 2.1}, "r2"),
        ({"method": "kerple_power", "r2": [1.0, 2.1, 1.0, 1.0]}, "r2"),
        ({"method": "t5_bias", "relative_attention_bias": []}, "relative_attention_bias"),
        ({"method": "t5_bias", "relative_attention_bias": learned(31, 4)}, "relative_attention_bias"),
        ({"method": "t5_bias", "relative_attention_bias": [[math.inf] * 4] * 32}, "relative_attention_bias"),
        ({"method": "t5_bias", "relative_attention_bias": [[]] * 32}, "relative_attention_bias"),
        ({"method": "t5_bias", "relative_attention_num_buckets": 31}, "relative_attention_num_buckets"),
        ({"method": "t5_bias", "relative_attention_max_distance": 16}, "relative_attention_max_distance"),
        ({"method": "drope", "factor": 0.5}, "factor"),
        ({"method": "drope", "coefficient": 0.0}, "coefficient"),
        ({"method": "drope", "factor": 2.0, "attention_temperature": 1.3}, "attention_temperature"),
    ],
)
def test_refused_with_the_name_of_the_field(fields: Any, name: str) -> None:
    with pytest.raises(InvalidEncoding) as caught:
        parse(fields)
    assert all(name in str(problem) for problem in caught.value.problems)


@pytest.mark.parametrize("heads", [1, 3, 5])
def test_lists_that_are_not_one_value_per_head(heads: int) -> None:
    for name, field, value in [
        ("kerple_log", "r1", [1.0] * heads),
        ("kerple_power", "r2", [1.0] * heads),
        ("t5_bias", "relative_attention_bias", learned(32, heads)),
        ("t5_bias", "relative_attention_bias", [*learned(31, 4), [1.0] * heads]),
    ]:
        with pytest.raises(ValueError, match=rf"^{field}: .*\b4 "):
            resolve(parse({"method": name, field: value}), GEOMETRY, 10)
