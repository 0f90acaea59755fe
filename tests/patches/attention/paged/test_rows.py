"""Rows of numbers against the recipes they come from: every method, random parameters, random positions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from patches import METHODS, ResolvedRecipe, RopeGeometry, effective_distance, parse, resolve
from patches.attention.paged.compilation import DoesNotFit, compiled, mask_row
from patches.attention.paged.rows import Row, Variant
from patches.encoding.bands import Band
from patches.encoding.masks import And, ChunkRange, DistanceRange, FirstKeys
from patches.encoding.recipe import Recipe
from patches.encoding.rotary import per_pair
from tests.methods import OTHER_ROWS, RELATIVE_ROWS, Fields, rows

PAIRS, TRAINED, HEADS, LENGTH = 8, 64, 6, 5000
GEOMETRY = RopeGeometry(2 * PAIRS, 2 * PAIRS, 1e4, TRAINED, TRAINED, HEADS)
TABLE = [request for row in rows(PAIRS, TRAINED, HEADS) for request in row.requests]
LARGEST = (1 << 24) - 1

counts = st.integers(1, 300)
factors = st.floats(1.0, 64.0)
DRAWN: dict[str, dict[str, st.SearchStrategy[object]]] = {
    "self_extend": {"group_size": counts, "neighbor_window": counts},
    "rerope": {"window": counts},
    "leaky_rerope": {"window": counts, "scaling_factor": factors},
    "string": {"shifted_offset": counts, "small_local_value": counts},
    "dpe": {"group_factors": st.lists(counts, min_size=PAIRS, max_size=PAIRS), "neighbor_window": counts},
    "dual_chunk": {"chunk_size": counts, "formulation": st.sampled_from(["paper", "repository"])},
    "lm_infinite": {"n_global": counts, "n_local": counts, "limit_distance": counts},
    "streaming": {"sink_tokens": counts, "window": counts, "absolute_positions": st.booleans()},
    "kerple_log": {"r1": st.floats(0.01, 10.0), "r2": st.floats(0.01, 10.0)},
    "kerple_power": {"r1": st.floats(0.01, 10.0), "r2": st.floats(0.01, 2.0)},
    "alibi": {"slope_factor": factors, "bias_dtype": st.sampled_from(["float32", "bfloat16"]), "scaled": st.booleans()},
}
"""Random parameters of every method whose bands or bias have some."""

TEMPERATURES = st.one_of(
    st.just("log_n"),
    st.just("reserved_length"),
    st.floats(0.1, 10.0),
    st.builds(lambda beta, length: {"kind": "floor_log", "beta": beta, "length": length}, st.floats(0.0, 10.0), counts),
)


@st.composite
def drawn_requests(draw: st.DrawFn) -> Fields:
    method = draw(st.sampled_from(sorted(DRAWN)))
    fields: Fields = {"method": method, **{name: draw(value) for name, value in DRAWN[method].items()}}
    return fields | {"attention_temperature": draw(TEMPERATURES)}


requests = st.one_of(st.sampled_from(TABLE), drawn_requests())
positions = st.lists(st.integers(0, 600) | st.integers(0, LARGEST), min_size=1, max_size=40).map(torch.tensor)


def resolved_or_skipped(fields: Fields) -> ResolvedRecipe:
    try:
        return resolve(parse(fields), GEOMETRY, LENGTH)
    except ValueError:
        assume(False)
        raise


def row_distance(row: Row, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
    """``effective_distance`` of states that were written under the base map and turn at read."""
    distance = torch.full((len(q_idx), len(kv_idx), 1), torch.nan, dtype=torch.float64)
    written_q, written_k = row.base(q_idx), row.base(kv_idx)
    for band in row.bands:
        query_turn, key_turn = row.turn(band.query_map, q_idx), row.turn(band.key_map, kv_idx)
        query = written_q if query_turn is None else written_q + query_turn
        key = written_k if key_turn is None else written_k + key_turn
        covered = band(q_idx[:, None], kv_idx[None])[..., None]
        distance = torch.where(covered, per_pair(query)[:, None] - per_pair(key)[None], distance)
    return distance


@given(requests, positions, positions)
def test_distances_and_masks_are_those_of_the_recipe(fields: Fields, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> None:
    resolved = resolved_or_skipped(fields)
    row = compiled(resolved, LENGTH)
    result, expected = row_distance(row, q_idx, kv_idx), effective_distance(resolved.recipe, q_idx, kv_idx)
    assert torch.equal(result.isnan().expand_as(expected), expected.isnan())
    # Whole positions are exact. The sum of a base and a fractional turn rounds twice.
    assert torch.allclose(result.expand_as(expected), expected, rtol=0.0, atol=1e-8, equal_nan=True)
    assert row.frequencies == resolved.turns


@given(requests, st.lists(st.integers(0, LENGTH - 1), min_size=1, max_size=40).map(torch.tensor), positions)
def test_biases_and_temperatures_are_those_of_the_recipe(
    fields: Fields, q_idx: torch.Tensor, anywhere: torch.Tensor
) -> None:
    recipe = resolved_or_skipped(fields).recipe
    row = compiled(resolved_or_skipped(fields), LENGTH)
    kv_idx = torch.arange(0, int(q_idx.max()) + 1, 7)
    if recipe.score_bias is None or row.bias is None:
        assert row.bias is recipe.score_bias is None
    else:
        causal = kv_idx[None] <= q_idx[:, None]
        pairs = q_idx[:, None], kv_idx[None]
        assert torch.allclose(row.bias(*pairs)[:, causal], recipe.score_bias(*pairs)[:, causal], rtol=2e-6, atol=1e-6)
    expected = torch.ones(len(anywhere))
    if recipe.attention_temperature is not None:
        expected = recipe.attention_temperature(anywhere)
    assert torch.allclose(row.temperature(anywhere).float(), expected, rtol=1e-5, atol=0.0)


def test_every_method_has_a_row_or_reads_weights_of_layers() -> None:
    fits = {request["method"] for request in TABLE} | {row.name for row in OTHER_ROWS}
    assert fits | {row.name for row in RELATIVE_ROWS} == set(METHODS)
    for row in OTHER_ROWS:
        geometry = replace(GEOMETRY, family=row.family, table_rows=LENGTH)
        for request in row.requests:
            assert compiled(resolve(parse(request), geometry, TRAINED), LENGTH).bands
    for row in RELATIVE_ROWS:
        relative = parse(row.requests[0])
        geometry = replace(GEOMETRY, family="relative", native=relative)
        with pytest.raises(DoesNotFit, match="weights of each layer"):
            compiled(resolve(relative, geometry, TRAINED), LENGTH)


def test_only_bands_with_another_key_map_turn_keys() -> None:
    rows = {request["method"]: compiled(resolve(parse(request), GEOMETRY, LENGTH), LENGTH) for request in TABLE}
    turning = {name for name, row in rows.items() if Variant.KEYS in row.variant}
    assert turning == {"self_extend", "rerope", "leaky_rerope", "dpe", "lm_infinite"}


@dataclass(frozen=True)
class Toy:
    """-distance^2 / 100, or the same beside a term by the query's position."""

    by_distance: bool

    def of_heads(self, heads: slice) -> Toy:
        return self

    def __call__(self, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        bias = -((q_idx - kv_idx).float() ** 2) / 100
        return (bias if self.by_distance else bias / (1 + q_idx)).expand(HEADS, -1, -1)


def test_any_bias_by_distance_has_a_row() -> None:
    resolved = ResolvedRecipe(Recipe(None, score_bias=Toy(by_distance=True)), (), 1.0, 0.0, None)
    row, pairs = compiled(resolved, LENGTH).bias, (torch.tensor([[900], [4999]]), torch.tensor([[0, 7, 899]]))
    assert row is not None
    assert torch.equal(row(*pairs), Toy(by_distance=True)(*pairs))


def test_recipes_without_a_row_say_why() -> None:
    schedule = resolve(parse({"method": "default"}), GEOMETRY, LENGTH).recipe.schedule
    masked = Recipe(schedule, (Band(predicate=And(DistanceRange(0, 4), ChunkRange(8))),))
    with pytest.raises(DoesNotFit, match="mask"):
        compiled(ResolvedRecipe(masked, (1.0,), 1.0, 1e4, None), LENGTH)
    with pytest.raises(DoesNotFit, match="bias Toy: only biases by distance alone fit"):
        compiled(ResolvedRecipe(Recipe(None, score_bias=Toy(by_distance=False)), (), 1.0, 0.0, None), LENGTH)
    with pytest.raises(DoesNotFit, match="temperature"):
        compiled(ResolvedRecipe(Recipe(None, attention_temperature=torch.sqrt), (), 1.0, 0.0, None), LENGTH)


@given(counts, st.none() | counts, positions, positions)
def test_layer_masks(size: int, high: int | None, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> None:
    pairs = q_idx[:, None], kv_idx[None]
    for mask in (DistanceRange(0, high), ChunkRange(size, 0, high)):
        expected = mask(*pairs)
        assert torch.equal(mask_row(mask)(*pairs), expected)
    for mask in (DistanceRange(1), FirstKeys(4)):
        with pytest.raises(DoesNotFit, match="mask of a layer"):
            mask_row(mask)
