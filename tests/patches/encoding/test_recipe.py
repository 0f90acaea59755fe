"""Recipes as values, and the properties that every method's recipe must have."""

from __future__ import annotations

import importlib
import itertools
import pickle
import pkgutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import patches
from patches import MAX_POSITION, METHODS, Recipe, RopeGeometry, parse, resolve
from patches.encoding.bands import IDENTITY, Band, Identity
from patches.encoding.masks import CAUSAL, EVERY_PAIR, UNBOUNDED, And, ChunkRange, DistanceRange, FirstKeys, Predicate
from tests import oracles
from tests.methods import REQUESTS, ROWS, Fields, Row, request_id
from tests.patches.distances import effective_distance, plain_distance

TRAINED = 256
GEOMETRY = RopeGeometry(64, 64, 10_000.0, TRAINED, TRAINED, num_attention_heads=4)

every_request = pytest.mark.parametrize("fields", REQUESTS, ids=request_id)
every_method = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def recipe_of(fields: Fields, geometry: RopeGeometry = GEOMETRY) -> Recipe:
    return parse(fields).recipe(geometry)


# Identity


@every_method
def test_factor_one_is_plain_rope(row: Row) -> None:
    if row.identity is None:
        pytest.skip("no setting of this method is plain RoPE")
    fields = {"method": row.name, **row.identity}
    resolved = resolve(parse(fields), GEOMETRY, TRAINED)
    assert resolved.inv_freq == pytest.approx(oracles.default(10_000.0, 64), rel=5e-7)
    assert resolved.attention_factor == 1.0
    assert resolved.recipe.score_bias is None
    assert resolved.recipe.attention_temperature is None
    distance = effective_distance(resolved.recipe, 100)
    assert torch.equal(distance.nan_to_num(-1.0), plain_distance(100).nan_to_num(-1.0).expand_as(distance))


@every_request
def test_short_requests_of_length_dependent_methods(fields: Fields) -> None:
    row = next(row for row in ROWS if row.name == fields["method"])
    recipe = recipe_of(fields)
    depends = row.depends_on_length or (row.hard_depends_on_length and fields == row.requests[1])
    assert recipe.depends_on_length == depends
    trained = fields.get("original_max_position_embeddings", TRAINED)
    short, trained_length, long = (recipe.resolve(GEOMETRY, n) for n in (1, trained, 8 * trained))
    assert short == trained_length
    assert (long != short) == depends
    assert (long.inv_freq != short.inv_freq) == row.depends_on_length
    assert (long.attention_factor != short.attention_factor) == row.tempered_by_length
    if row.plain_when_short:
        theta = fields.get("rope_theta", 10_000.0)
        assert short.inv_freq == pytest.approx(oracles.default(theta, 64), rel=5e-7)


# Bands


@every_request
def test_bands_partition_the_causal_triangle(fields: Fields) -> None:
    """Methods that leave causal pairs out leave out some; which ones is compared with their definition elsewhere."""
    row = next(row for row in ROWS if row.name == fields["method"])
    q_idx, kv_idx = torch.arange(90)[:, None], torch.arange(90)[None]
    covered = torch.stack([band.predicate(q_idx, kv_idx).int() for band in recipe_of(fields).bands]).sum(0)
    causal = torch.ones(90, 90).tril().int()
    assert (covered <= causal).all()
    assert torch.equal(covered, causal) == row.covers_all


@every_method
def test_where_keys_rotate_is_derived(row: Row) -> None:
    expected = "never" if not row.rotates else "cache_read" if row.turns_keys else "cache_write"
    hint = f"{row.name}: rotates_at of its class, or rotates, turns_keys and bands of its row in tests/methods.py"
    assert METHODS[row.name].rotates_at == expected, hint
    for fields in row.requests:
        resolved = resolve(parse(fields), GEOMETRY, 1000)
        assert len(resolved.recipe.bands) == row.bands, hint
        assert resolved.rotates_at == expected, hint
        assert resolved.rotates == row.rotates


def test_keys_of_one_map_never_turn_at_read() -> None:
    plain = recipe_of({"method": "default"})
    assert plain.resolve(GEOMETRY, 10).is_plain
    grouped = recipe_of({"method": "self_extend", "group_size": 4, "neighbor_window": 8}).bands[1].key_map
    for query_map, key_map in itertools.product((IDENTITY, grouped), repeat=2):
        moved = replace(plain, bands=(Band(query_map, key_map),)).resolve(GEOMETRY, 10)
        assert moved.recipe.base == key_map
        assert moved.rotates_at == "cache_write"
        assert moved.is_plain == (query_map == key_map)


@every_request
def test_the_base_is_the_key_map_of_most_keys(fields: Fields) -> None:
    recipe, position = recipe_of(fields), torch.arange(100_000)
    counts = [int(band.predicate(position[-1:, None], position[None]).sum()) for band in recipe.bands]
    assert recipe.base == recipe.bands[counts.index(max(counts))].key_map


def ends(low: int, width: int | None) -> tuple[int, int | None]:
    return low, None if width is None else low + width


distance_ranges = st.builds(
    lambda *given: DistanceRange(*ends(*given)), st.integers(0, 20), st.none() | st.integers(1, 20)
)
chunk_ranges = st.builds(
    lambda size, *given: ChunkRange(size, *ends(*given)),
    *(st.integers(1, 20), st.integers(0, 3), st.none() | st.integers(1, 3)),
)
single = distance_ranges | chunk_ranges | st.builds(FirstKeys, st.integers(0, 20), st.integers(0, 20))
predicates = st.recursive(distance_ranges, lambda inner: st.builds(And, inner, inner), max_leaves=3) | single


@given(predicates, st.integers(0, 40), st.integers(0, 12))
def test_key_range_holds_every_reachable_key_and_no_more(predicate: Predicate, q_low: int, rows: int) -> None:
    q_high = q_low + rows
    q_idx, kv_idx = torch.arange(q_low, q_high + 1)[:, None], torch.arange(60)[None]
    reachable = predicate(q_idx, kv_idx).any(0).nonzero().flatten().tolist()
    first, last = predicate.key_range(q_low, q_high)
    assert 0 <= first <= last
    if reachable:
        # Intersections of distance ranges are distance ranges, so bounds are exact whenever a key is reached.
        assert (first, last) == (reachable[0], reachable[-1] + 1)
    elif not isinstance(predicate, And):
        assert first == last


@given(predicates | st.builds(And, single, single), st.integers(0, 40), st.integers(0, 12))
def test_a_key_range_backwards_holds_the_keys_of_every_query(predicate: Predicate, q_low: int, rows: int) -> None:
    q_high = q_low + rows
    q_idx, kv_idx = torch.arange(q_low, q_high + 1)[:, None], torch.arange(60)[None]
    shared = predicate(q_idx, kv_idx).all(0).nonzero().flatten().tolist()
    assert list(range(*predicate.key_range(q_high, q_low))) == shared


@given(predicates | st.builds(And, single, single), st.integers(1, 9))
def test_what_a_predicate_says_of_itself(predicate: Predicate, step: int) -> None:
    """``most_keys`` bounds those of any query, and ``by_distance`` ones move along."""
    position = torch.arange(300)
    covered = predicate(position[:, None], position[None])
    most = int(covered.sum(1).max())
    assert most <= predicate.most_keys
    if not isinstance(predicate, And):
        assert predicate.most_keys in (most, UNBOUNDED)
        assert isinstance(predicate, FirstKeys) or (predicate.most_keys == UNBOUNDED) == (predicate.high is None)
    if predicate.by_distance:
        assert torch.equal(covered[step:, step:], covered[:-step, :-step])


def test_every_pair_is_every_pair() -> None:
    position = torch.arange(9)
    assert EVERY_PAIR(position[:, None], position[None]).all()
    assert EVERY_PAIR.by_distance
    assert EVERY_PAIR.most_keys == UNBOUNDED
    first, last = EVERY_PAIR.key_range(3, 5)
    assert (first, last >= MAX_POSITION) == (0, True)


def test_a_predicate_never_looks_ahead() -> None:
    with pytest.raises(ValueError, match="low"):
        DistanceRange(low=-1)


# Recipes are values


def namespace() -> dict[str, Any]:
    """Every public name of the package's modules, as ``eval`` of a printed recipe needs them."""
    names: dict[str, Any] = {}
    for module in pkgutil.walk_packages(patches.__path__, "patches."):
        triton = "patches.attention.paged.triton.kernel", "patches.model.fusion.kernels"
        if module.name not in ("patches.model.hf", *triton):  # the first imports transformers
            names.update(vars(importlib.import_module(module.name)))
    return names


@every_request
def test_recipes_hash_compare_print_and_pickle(fields: Fields) -> None:
    recipe, again = recipe_of(fields), recipe_of(fields)
    assert recipe is not again
    assert recipe == again
    assert hash(recipe) == hash(again)
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert eval(repr(recipe), namespace()) == recipe

    resolved = recipe.resolve(GEOMETRY, 1000)
    assert resolved == again.resolve(GEOMETRY, 1000)
    assert hash(resolved) == hash(again.resolve(GEOMETRY, 1000))
    assert resolved.frequency_hash == pickle.loads(pickle.dumps(resolved)).frequency_hash
    assert pickle.loads(pickle.dumps(resolved)) == resolved
    assert eval(repr(resolved), namespace()) == resolved


def test_different_requests_are_different_recipes() -> None:
    recipes = {recipe_of(fields): request_id(fields) for fields in REQUESTS}
    assert len(recipes) == len(REQUESTS)
    hashes = {resolve(parse(f), GEOMETRY, 1000).frequency_hash for f in REQUESTS if f["method"] in ("yarn", "ntk")}
    assert len(hashes) == 4


def test_recipes_are_frozen() -> None:
    recipe = recipe_of({"method": "default"})
    with pytest.raises(AttributeError):
        recipe.bands = ()  # type: ignore[misc]
    with pytest.raises(AttributeError):
        recipe.resolve(GEOMETRY, 1).attention_factor = 2.0  # type: ignore[misc]


def test_a_recipe_without_bands_or_with_maps_but_no_frequencies_is_refused() -> None:
    with pytest.raises(ValueError, match="band"):
        Recipe(schedule=None, bands=())
    far = recipe_of({"method": "self_extend", "group_size": 4, "neighbor_window": 8}).bands[1]
    with pytest.raises(ValueError, match="schedule"):
        Recipe(schedule=None, bands=(far,))
    assert Recipe(None, (Band(Identity(), Identity(), CAUSAL),)).bands == Recipe(None).bands
