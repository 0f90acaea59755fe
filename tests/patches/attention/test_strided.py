"""Several sequences in one call: which ones, and the output that each has alone."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from patches.attention.strided import ALIKE, strided_attention, strided_batches

SEQUENCES = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 300), st.integers(0, 300)), min_size=1, max_size=12)
"""(place in steps of 100, keys, places behind the last key) of each."""


@given(SEQUENCES)
@settings(max_examples=300, deadline=None)
def test_batches_have_equal_distances_and_like_lengths(sequences: list[tuple[int, int, int]]) -> None:
    places = [range(100 * start, 100 * start + length + more) for start, length, more in sequences]
    lengths = [length for _, length, _ in sequences]
    members = range(0, len(sequences), 1)
    batches = strided_batches(members, places, lengths, torch.zeros(1))
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
    (batch,) = strided_batches(range(4), places, lengths, torch.zeros(1))
    assert batch.members == [1, 3, 0, 2]
    assert (batch.first, batch.stride, batch.length) == (0, 128, 128)
    assert [b.members for b in strided_batches((0, 4, 5), places, lengths, torch.zeros(1))] == [[0, 5, 4]]
    assert strided_batches((0, 2), [*places[:2], None], lengths, torch.zeros(1)) == []


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[40, 40, 40], [40, 17, 33]], ids=["equal", "unequal"])
@pytest.mark.parametrize("value_dim", [8, 4])
def test_each_sequence_has_its_output_alone(kv_heads: int, lengths: list[int], value_dim: int) -> None:
    torch.manual_seed(0)
    starts, heads, dim = [9, 109, 59], 4, 8
    query = torch.randn(1, heads, 4, dim)
    keys, values = torch.randn(200, kv_heads, dim), torch.randn(200, kv_heads, value_dim)
    (batch,) = strided_batches(range(3), [range(start, start + 50) for start in starts], lengths, query)
    out = strided_attention(query, keys, values, 0.3, batch)
    assert out.shape == (1, 3, heads, value_dim)
    for row, member in enumerate(batch.members):
        own = slice(starts[member], starts[member] + lengths[member])
        key, value = (each[own].transpose(0, 1).repeat_interleave(heads // kv_heads, 0) for each in (keys, values))
        expected = F.softmax(query[0, :, member : member + 1] @ key.transpose(1, 2) * 0.3, -1) @ value
        assert torch.allclose(out[0, row], expected[:, 0], atol=1e-6)


def test_keys_behind_the_last_weigh_nothing() -> None:
    query, cache = torch.full((1, 1, 2, 2), 10.0), torch.full((8, 1, 2), 1000.0)
    cache[0], cache[4:6] = 1.0, 1.0
    (batch,) = strided_batches(range(2), [range(4), range(4, 8)], [1, 2], query)
    out = strided_attention(query, cache, cache, 1.0, batch)
    assert not math.isnan(out.sum().item())
    assert (out == 1).all()
