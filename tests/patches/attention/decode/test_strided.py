"""Several sequences in one call: which ones, and the output that each has alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patches import parse, resolve
from patches.attention import reference
from patches.attention.decode.reading import FEW, ORDINARY, Reading, reading_of
from patches.attention.decode.strided import ALIKE, StridedBatch, strided_attention, strided_batches
from patches.attention.layer import Layer
from patches.attention.states import SegmentStates
from patches.batch.segments import Batch
from patches.encoding.recipe import ResolvedRecipe
from tests.methods import Fields
from tests.patches.attention.decode.test_single_query import GEOMETRY, MOVING
from tests.patches.forward import relative

SEQUENCES = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 300), st.integers(0, 300)), min_size=1, max_size=12)
"""(place in steps of 100, keys, places behind the last key) of each."""

MORE: list[Fields] = [
    *MOVING,
    {"method": "default"},
    {"method": "alibi"},
    {"method": "sandwich"},
    {"method": "default", "attention_temperature": "log_n"},
    {"method": "self_extend", "group_size": 8, "neighbor_window": 21, "attention_temperature": 1.5},
]


def ordinary(
    places: Sequence[range | None], lengths: Sequence[int], query: torch.Tensor | None = None, kv_heads: int = 1
) -> list[StridedBatch]:
    query = torch.zeros(1, 1, len(lengths), 1) if query is None else query
    return strided_batches([ORDINARY] * len(lengths), places, lengths, query, kv_heads)


@given(SEQUENCES)
@settings(max_examples=300, deadline=None)
def test_batches_have_equal_distances_and_like_lengths(sequences: list[tuple[int, int, int]]) -> None:
    places = [range(100 * start, 100 * start + length + more) for start, length, more in sequences]
    lengths = [length for _, length, _ in sequences]
    batches = ordinary(places, lengths)
    taken = [member for batch in batches for member in batch.members]
    assert len(taken) == len(set(taken))
    for batch in batches:
        own = [lengths[member] for member in batch.members]
        assert len(own) > 1
        assert [places[member].start for member in batch.members] == [
            batch.first + number * batch.stride for number in range(len(own))
        ]
        assert batch.length == max(own) < min(own) + ALIKE
        assert all(batch.length <= len(places[member]) for member in batch.members)
        assert (batch.bias is None) == (min(own) == max(own))


def test_a_row_of_requests_is_one_batch() -> None:
    places = [range(start, start + 128) for start in (256, 0, 384, 128, 1024, 640)]
    lengths = [100, 90, 70, 128, 65, 64]
    (batch,) = ordinary(places[:4], lengths[:4])
    assert batch.members == [1, 3, 0, 2]
    assert (batch.first, batch.stride, batch.length) == (0, 128, 128)
    (batch,) = ordinary([places[0], *places[4:]], [lengths[0], *lengths[4:]])
    assert (batch.members, batch.stride) == ([0, 2, 1], 384)
    assert ordinary([places[0], None], lengths[:2]) == []


def reading(resolved: ResolvedRecipe, length: int, heads: int, kv_heads: int) -> Reading:
    query, key = torch.zeros(1, heads, 1, GEOMETRY.head_dim), torch.zeros(1, kv_heads, length, GEOMETRY.head_dim)
    return reading_of(SegmentStates(query, key, key, resolved, Batch([]), Layer(0.3), length - 1, 0))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("lengths", [(50, 50, 50), (50, 17, 41), (300, 280, 299)], ids=str)
@pytest.mark.parametrize("fields", MORE, ids=str)
def test_each_sequence_has_its_output_alone(fields: Fields, lengths: tuple[int, ...], kv_heads: int) -> None:
    """Beside it are one of ordinary attention and one of a bias."""
    generator = torch.Generator().manual_seed(0)
    starts, heads, dim, layer = [9, 659, 334], 4, GEOMETRY.head_dim, Layer(0.3)
    query = torch.randn(1, heads, 5, dim, generator=generator)
    keys, values = torch.randn(2, kv_heads, 1000, dim, generator=generator).mul(2)
    for others in (fields, {"method": "default"}), (fields, fields), ({"method": "alibi"}, fields):
        resolved = [resolve(parse(each), GEOMETRY, 300) for each in (fields, *others)]
        readings = [
            *(reading(each, length, heads, kv_heads) for each, length in zip(resolved, lengths, strict=True)),
            None,
            reading(resolved[0], FEW + 1, heads, kv_heads),
        ]
        places = [*(range(start, start + 325) for start in starts), range(984, 999), range(0, FEW + 1)]
        batches = strided_batches(readings, places, [*lengths, 1, FEW + 1], query, kv_heads)
        taken = [member for batch in batches for member in batch.members]
        assert set(taken) <= {0, 1, 2}
        if others == (fields, fields) and len(set(lengths)) == 1:
            assert sorted(taken) == [0, 1, 2]
        for batch in batches:
            out = strided_attention(query, keys, values, 0.3, batch)
            assert out.shape == (1, len(batch.members), heads, dim)
            for row, member in enumerate(batch.members):
                own = slice(starts[member], starts[member] + lengths[member])
                key, value = (states[None, :, own] for states in (keys, values))
                alone = query[:, :, member : member + 1], key, value, resolved[member], layer
                expected = reference.attend(*alone, q_start=lengths[member] - 1)
                assert relative(out[:, row, :, None], expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "rotary", [{"interleaved": True}, {"rotary_dim": 8}, {"rotary_dim": 8, "rotary_offset": 8}], ids=str
)
@pytest.mark.parametrize("fields", MOVING, ids=str)
def test_queries_and_keys_turn_as_the_model_turns_them(
    fields: Fields, rotary: dict[str, Any], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    geometry = replace(GEOMETRY, **rotary)
    resolved, layer, places = resolve(parse(fields), geometry, 300), Layer(0.3), [range(90), range(100, 190)]
    query = torch.randn(1, 4, 2, 16, generator=generator).to(dtype)
    keys, values = torch.randn(2, 2, 200, 16, generator=generator).to(dtype)
    (batch,) = strided_batches([reading(resolved, 80, 4, 2)] * 2, places, [80, 80], query, 2)
    if batch.keys is not None and batch.turns == 1:
        assert batch.query is None, "it turns by the operations that turn the keys"
    out = strided_attention(query, keys, values, 0.3, batch)
    for member, place in enumerate(places):
        key, value = (states[None, :, place.start : place.start + 80] for states in (keys, values))
        alone = query[:, :, member : member + 1], key, value, resolved, layer
        expected = reference.attend(*(each.double() for each in alone[:3]), resolved, layer, q_start=79)
        assert relative(out[:, member, :, None].double(), expected) < (3e-2 if dtype == torch.bfloat16 else 1e-5)


def test_keys_and_values_may_differ_in_width() -> None:
    query, keys, values = torch.randn(1, 4, 2, 8), torch.randn(4, 64, 8), torch.randn(4, 64, 6)[..., :4]
    (batch,) = ordinary([range(32), range(32, 64)], [20, 30], query, 4)
    out = strided_attention(query, keys, values, 0.3, batch)
    for member, own in enumerate((slice(0, 20), slice(32, 62))):
        scores = query[0, :, member : member + 1] @ keys[:, own].mT * 0.3
        expected = scores.softmax(-1) @ values[:, own]
        assert torch.allclose(out[0, member], expected[:, 0], atol=1e-6)


def test_keys_behind_the_last_weigh_nothing() -> None:
    query, cache = torch.full((1, 1, 2, 2), 10.0), torch.full((1, 8, 2), 1000.0)
    cache[:, 0], cache[:, 4:6] = 1.0, 1.0
    (batch,) = ordinary([range(4), range(4, 8)], [1, 2], query)
    out = strided_attention(query, cache, cache, 1.0, batch)
    assert not math.isnan(out.sum().item())
    assert (out == 1).all()
