"""One new query: the keys that it reaches, and the few of them that turn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from patches import RopeGeometry, parse, resolve
from patches.attention import reference
from patches.attention.decode import single_query
from patches.attention.fused import attend
from patches.attention.layer import Layer
from patches.attention.states import SegmentStates
from patches.batch.segments import Batch
from patches.encoding.masks import And, ChunkRange, DistanceRange, FirstKeys, Predicate
from tests.methods import Fields
from tests.patches.forward import relative

GEOMETRY = RopeGeometry(16, 16, 1e4, 64, 64, 4)
MOVING: list[Fields] = [
    {"method": "string", "shifted_offset": 21, "small_local_value": 4},
    {"method": "dual_chunk", "chunk_size": 32, "local_window": 8},
    {"method": "leaky_rerope", "window": 21},
    {"method": "streaming", "sink_tokens": 4, "window": 21},
    {"method": "self_extend", "group_size": 8, "neighbor_window": 21},
    {"method": "rerope", "window": 21},
    {"method": "dpe", "group_factors": [8, 24], "neighbor_window": 21},
    {"method": "lm_infinite", "n_global": 5, "n_local": 21, "limit_distance": 30},
]

PREDICATES: list[Predicate] = [
    DistanceRange(3, 9),
    DistanceRange(4),
    FirstKeys(5, 3),
    ChunkRange(7, 1, 3),
    ChunkRange(7),
    And(DistanceRange(2, 30), ChunkRange(7, 0, 2)),
]


@pytest.mark.parametrize("predicate", PREDICATES, ids=str)
def test_one_query_reaches_a_range_of_keys(predicate: Predicate) -> None:
    """So a single query needs no mask."""
    for position in range(50):
        keys = torch.arange(position + 1)
        covered = keys[predicate(torch.tensor([[position]]), keys[None])[0]].tolist()
        assert covered == list(range(*predicate.key_range(position, position)))


@pytest.mark.parametrize("fields", [*MOVING, {"method": "default"}, {"method": "alibi"}], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_heads_that_share_many_keys_are_queries_of_one_head(
    fields: Fields, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(single_query, "MANY", 200)
    shapes: list[torch.Size] = []
    for name in ("_attend", "sdpa_with_lse"):
        called = getattr(single_query, name)
        monkeypatch.setattr(
            single_query, name, lambda query, *rest, called=called: shapes.append(query.shape) or called(query, *rest)
        )
    generator = torch.Generator().manual_seed(0)
    resolved, layer = resolve(parse(fields), GEOMETRY, 300), Layer(0.3)
    for past in (0, 45, 255):
        shapes.clear()
        query = torch.randn(1, 4, 1, 16, generator=generator)
        key, value = torch.randn(2, 1, kv_heads, past + 1, 16, generator=generator).mul(2)
        states = SegmentStates(query, key, value, resolved, Batch([]), layer, past, 0)
        result = single_query.single_query(states)
        expected = reference.attend(query, key, value, resolved, layer, q_start=past)
        assert relative(result, expected) < 1e-5
        grouped = (1, kv_heads, 4 // kv_heads, 16)
        assert set(shapes) == {grouped if (past + 1) * 4 >= 200 * kv_heads else (1, 4, 1, 16)}


@pytest.mark.parametrize("fields", MOVING, ids=str)
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_each_band_is_a_part(fields: Fields, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    resolved, layer = resolve(parse(fields), GEOMETRY, 300), Layer(0.3)
    for past in (0, 1, 21, 28, 29, 45, 255):
        query = torch.randn(2, 4, 1, 16, generator=generator)
        key, value = torch.randn(2, 2, kv_heads, past + 1, 16, generator=generator).mul(2)
        result = attend(query, key, value, resolved, Batch([]), layer, q_start=past)
        expected = reference.attend(query, key, value, resolved, layer, q_start=past)
        assert relative(result, expected) < 1e-5


@pytest.mark.parametrize("fields", MOVING, ids=str)
def test_bands_of_few_keys_share_a_call(fields: Fields) -> None:
    generator = torch.Generator().manual_seed(0)
    resolved, layer = resolve(parse(fields), GEOMETRY, 300), Layer(0.3)
    for past in (0, 1, 21, 28, 29, 45, 255):
        query = torch.randn(1, 4, 1, 16, generator=generator)
        key, value = torch.randn(2, 1, 2, past + 1, 16, generator=generator).mul(2)
        states = SegmentStates(query, key, value, resolved, Batch([]), layer, past, 0)
        reading = single_query.reading_of(states)
        if fields["method"] in ("self_extend", "rerope", "dpe"):
            assert len(reading.parts) == 1
        expected = reference.attend(query, key, value, resolved, layer, q_start=past)
        result = single_query.read(query, key, value, layer.scaling, reading)
        assert relative(result, expected) < 1e-5


@pytest.mark.parametrize("fields", MOVING, ids=str)
def test_most_keys_are_read_as_they_were_written(fields: Fields, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turning every cached key at every step would cost as much as attention."""
    turned = []
    for name in ("turn", "turn_into"):
        turn = getattr(single_query, name)
        monkeypatch.setattr(single_query, name, partial(_noted, turn, turned))
    query, key = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 300, 16)
    attend(query, key, key, resolve(parse(fields), GEOMETRY, 300), Batch([]), Layer(0.3), q_start=299)
    assert turned
    assert max(turned) <= 21


def _noted(
    turn: Callable[..., Any], turned: list[int], states: torch.Tensor, *table: torch.Tensor, **layout: Any
) -> Any:
    turned.append(states.shape[2])
    return turn(states, *table, **layout)


def test_keys_out_of_reach_are_not_read() -> None:
    fields = {"method": "streaming", "sink_tokens": 4, "window": 20}
    resolved = resolve(parse(fields), GEOMETRY, 300)
    query, key = torch.randn(1, 4, 1, 16), torch.randn(1, 4, 300, 16)
    key[:, :, 4:280] = torch.nan
    result = attend(query, key, key, resolved, Batch([]), Layer(0.3), q_start=299)
    assert not result.isnan().any()


def test_the_window_of_a_layer_cuts_a_band() -> None:
    generator = torch.Generator().manual_seed(0)
    resolved, layer = resolve(parse(MOVING[0]), GEOMETRY, 300), Layer(0.3, DistanceRange(0, 100))
    query, key = torch.randn(1, 4, 1, 16, generator=generator), torch.randn(1, 2, 254, 16, generator=generator)
    key = key.mul(2)
    result = attend(query, key, key, resolved, Batch([]), layer, q_start=253)
    assert relative(result, reference.attend(query, key, key, resolved, layer, q_start=253)) < 1e-5
