"""The reference attention against the papers' score of every (m, n), for every method of the table."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from patches import ResolvedRecipe, RopeGeometry, parse, resolve
from patches.attention import reference
from patches.attention.layer import Layer
from patches.encoding.masks import CAUSAL, DistanceRange
from patches.encoding.rotary import rotary_table, rotate
from tests import oracles
from tests.methods import Fields, Row, one_per_shape, request_id, rows
from tests.patches.forward import written

HEAD_DIM, LENGTH, TRAINED, SCALING = 16, 40, 32, 0.3


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray, resolved: ResolvedRecipe, window: int | None) -> np.ndarray:
    """The reference, after the rotation that states get outside of it."""
    query, key, value = (torch.tensor(x, dtype=torch.float32)[None] for x in (q, k, v))
    query, key = written(query, resolved), written(key, resolved)
    layer = Layer(SCALING, CAUSAL if window is None else DistanceRange(0, window))
    return reference.attend(query, key, value, resolved, layer, q_start=0)[0].numpy()


def geometry_of(rotary_dim: int, interleaved: bool) -> RopeGeometry:
    return RopeGeometry(HEAD_DIM, rotary_dim, 10_000.0, TRAINED, 2 * TRAINED, 4, interleaved=interleaved)


def check(fields: Fields, geometry: RopeGeometry, window: int | None = None) -> None:
    rotary_dim, interleaved = geometry.rotary_dim, geometry.interleaved
    model = oracles.Model(10_000.0, rotary_dim, TRAINED, 2 * TRAINED, 4, SCALING, interleaved, window, HEAD_DIM)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((heads, LENGTH, HEAD_DIM)) for heads in (4, 2, 2))
    expected = oracles.attention(q, k, v, oracles.encoding(fields, model, LENGTH), model)
    result = attended(q, k, v, resolve(parse(fields), geometry, LENGTH), window)
    np.testing.assert_allclose(result, expected, rtol=0, atol=2e-5, err_msg=request_id(fields))


@pytest.mark.parametrize("row", rows(HEAD_DIM // 2, TRAINED), ids=lambda row: row.name)
def test_attention_equals_the_paper(row: Row) -> None:
    for fields in row.requests:
        check(fields, geometry_of(HEAD_DIM, False))


@pytest.mark.parametrize("method", ["alibi", "kerple_log"])
def test_a_temperature_multiplies_products_and_no_bias(method: str) -> None:
    check({"method": method, "attention_temperature": 1.7}, geometry_of(HEAD_DIM, False))


@pytest.mark.parametrize(
    ("rotary_dim", "window", "interleaved"),
    [(16, None, True), (8, None, False), (8, None, True), (16, 12, False)],
    ids=["interleaved", "partial", "partial and interleaved", "window"],
)
def test_every_shape_of_recipe_in_other_geometries(rotary_dim: int, window: int | None, interleaved: bool) -> None:
    geometry, table = geometry_of(rotary_dim, interleaved), rows(rotary_dim // 2, TRAINED)
    whole = rotary_dim == HEAD_DIM
    requests = [fields for row in table if whole or not row.whole_head for fields in row.requests]
    for fields in one_per_shape(requests, geometry, LENGTH):
        check(fields, geometry, window)


def test_attention_factor_leaves_the_unrotated_part_alone() -> None:
    """With half of the head rotated, a factor on cos and sin is not a factor on the score."""
    q = k = np.ones((1, 1, HEAD_DIM))
    how = oracles.Encoding(oracles.default(10_000.0, 8), attention_factor=2.0)
    model = oracles.Model(10_000.0, 8, TRAINED, TRAINED, 1)
    assert oracles.scores(q, k, how, model)[0, 0, 0] == pytest.approx(4.0 * 8 + 8)
    cos, sin = rotary_table(torch.tensor([[5]]), torch.tensor(how.inv_freq), 2.0, interleaved=False)
    turned = rotate(torch.ones(1, HEAD_DIM), cos, sin, interleaved=False)[0]
    assert float(turned @ turned) == pytest.approx(4.0 * 8 + 8, rel=1e-6)
