"""Masks of methods that leave pairs out: bands, ranges of keys, keys that go, and recall."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patches import METHODS, parse, resolve
from tests.methods import Fields
from tests.patches.distances import plain_distance
from tests.patches.methods.drawn_maps import ATTENDED, GEOMETRY, MOVING, drawn, parameters_of


@given(drawn, st.integers(1, 70))
def test_bands_are_disjoint_and_cover_what_is_documented(fields: Fields, length: int) -> None:
    m, n = torch.arange(length)[:, None], torch.arange(length)[None]
    covered = torch.stack([band.predicate(m, n).int() for band in parse(fields).recipe(GEOMETRY).bands]).sum(0)
    expected = m >= n
    if fields["method"] in ATTENDED:
        expected &= ATTENDED[fields["method"]](parameters_of(fields), m, n)
    assert torch.equal(covered, expected.int())


@given(drawn, st.integers(0, 60), st.integers(0, 40))
def test_key_ranges_hold_every_covered_pair_and_no_more(fields: Fields, q_low: int, more: int) -> None:
    q_idx, kv_idx = torch.arange(q_low, q_low + more + 1)[:, None], torch.arange(q_low + more + 20)[None]
    for band in parse(fields).recipe(GEOMETRY).bands:
        keys = band.predicate(q_idx, kv_idx).any(0).nonzero().flatten().tolist()
        first, last = band.predicate.key_range(q_low, q_low + more)
        assert 0 <= first <= last
        if keys:
            assert (first, last) == (keys[0], keys[-1] + 1)


@given(drawn)
def test_bands_come_from_near_to_far(fields: Fields) -> None:
    distance = plain_distance(70)[..., 0]
    m, n = torch.arange(70)[:, None], torch.arange(70)[None]
    closest = [distance[band.predicate(m, n)].min() for band in parse(fields).recipe(GEOMETRY).bands]
    assert closest[0] == 0
    assert closest == sorted(closest)


@given(drawn, st.integers(1, 70))
def test_a_layer_that_does_not_rotate_keeps_the_mask(fields: Fields, length: int) -> None:
    m, n = torch.arange(length)[:, None], torch.arange(length)[None]
    resolved = resolve(parse(fields), GEOMETRY, length)
    before, after = (
        torch.stack([band.predicate(m, n).int() for band in bands]).sum(0)
        for bands in (resolved.recipe.bands, resolved.unrotated.recipe.bands)
    )
    assert torch.equal(before, after)
    if MOVING[fields["method"]].covers_all:
        assert resolved.unrotated.is_plain


@given(drawn, st.integers(1, 70))
def test_only_windowed_methods_let_keys_go_and_none_that_is_attended_later(fields: Fields, length: int) -> None:
    recipe = parse(fields).recipe(GEOMETRY)
    assert (recipe.sink_window is None) == MOVING[fields["method"]].covers_all
    if recipe.sink_window is not None:
        first, last = recipe.sink_window
        m, n = torch.arange(length)[:, None], torch.arange(length)[None]
        gone = (n >= first) & (m - n >= last)
        assert not any(bool((band.predicate(m, n) & gone).any()) for band in recipe.bands)


@pytest.mark.parametrize("name", ATTENDED)
def test_methods_that_forget_say_so(name: str) -> None:
    assert "does not extend recall" in METHODS[name].training_free
    assert "recall" in METHODS[name].avoid.lower()
    assert "recall" in METHODS[name].reach
