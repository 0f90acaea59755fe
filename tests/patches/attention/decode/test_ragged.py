"""Sums of keys: the output that each sequence has alone, wherever its keys lie, and when they are taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from patches import parse, resolve
from patches.attention import reference
from patches.attention.decode import ragged
from patches.attention.decode import together as choice
from patches.attention.decode.ragged import (
    LEAST_SCORES,
    MOST_SCORES,
    Candidate,
    fits,
    ragged_attention,
    ragged_batch,
)
from patches.attention.decode.single_query import FEW, ORDINARY
from patches.attention.decode.together import together
from patches.attention.layer import Layer
from tests.methods import Fields
from tests.patches.attention.decode.test_single_query import GEOMETRY
from tests.patches.attention.decode.test_strided import MORE, reading
from tests.patches.forward import relative

LENGTHS = [60, 17, 300, 300]
RUNS = [
    [range(640, 700)],
    [range(4), range(620, 633)],
    [range(320, 420), range(10, 170), range(200, 240)],
    [range(700, 1000)],
]
"""The places of all keys: in one piece or several, in any order."""


def keys_of(states: torch.Tensor, runs: list[range]) -> torch.Tensor:
    """[1, kv_heads, keys, dim]."""
    return torch.cat([states[run.start : run.stop] for run in runs]).transpose(0, 1)[None]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("rotary", [{}, {"interleaved": True}, {"rotary_dim": 8, "rotary_offset": 8}], ids=str)
@pytest.mark.parametrize("fields", MORE, ids=str)
def test_each_sequence_has_its_output_alone(fields: Fields, rotary: dict[str, Any], kv_heads: int) -> None:
    """Sequences of this encoding are between one of ordinary attention and one of a bias."""
    generator = torch.Generator().manual_seed(0)
    geometry = replace(GEOMETRY, **rotary)
    heads, dim, layer = 4, GEOMETRY.head_dim, Layer(0.3)
    query = torch.randn(1, heads, 6, dim, generator=generator)
    keys, values = torch.randn(2, 1000, kv_heads, dim, generator=generator).mul(2)
    methods: list[Fields] = [{"method": "default"}, fields, fields, {"method": "alibi"}]
    resolved = [resolve(parse(each), geometry, 300) for each in methods]
    candidates = [
        Candidate(number, own, length, runs)
        for number, each, length, runs in zip((5, 0, 3, 2), resolved, LENGTHS, RUNS, strict=True)
        if not (own := reading(each, length, heads, kv_heads)).turns_keys
    ]
    batch = ragged_batch(candidates, 6, heads, keys)
    assert batch.members == [candidate.number for candidate in candidates]
    for scaling in (0.1, 0.3):
        out = ragged_attention(query, keys, values, scaling, batch)
    assert out.shape == (1, len(candidates), heads, dim)
    for row, candidate in enumerate(candidates):
        recipe = resolved[(5, 0, 3, 2).index(candidate.number)]
        own = [keys_of(states, list(candidate.runs)) for states in (keys, values)]
        alone = query[:, :, candidate.number : candidate.number + 1], *own, recipe, layer
        expected = reference.attend(*alone, q_start=candidate.length - 1)
        assert relative(out[:, row, :, None], expected) < 1e-5


def test_readings_of_several_turns_are_among_them() -> None:
    turns = {
        fields["method"]: len({id(part.query) for part in own.parts})
        for fields in MORE
        if not (own := reading(resolve(parse(fields), GEOMETRY, 1200), 1000, 4, 2)).turns_keys
    }
    assert max(turns.values()) > 1
    assert FEW < 1000


def test_keys_and_values_may_differ_in_width() -> None:
    query, keys, values = torch.randn(1, 4, 2, 8), torch.randn(64, 2, 8), torch.randn(64, 2, 4)
    candidates = [Candidate(0, ORDINARY, 20, [range(20)]), Candidate(1, ORDINARY, 30, [range(32, 62)])]
    out = ragged_attention(query, keys, values, 0.3, ragged_batch(candidates, 2, 4, keys))
    for member, own in enumerate((slice(0, 20), slice(32, 62))):
        key, value = (states[own].repeat_interleave(2, 1).transpose(0, 1) for states in (keys, values))
        expected = (query[0, :, member : member + 1] @ key.mT * 0.3).softmax(-1) @ value
        assert torch.allclose(out[0, member], expected[:, 0], atol=1e-6)


def test_a_sequence_without_numbers_leaves_the_others_theirs() -> None:
    """In its step, and in the next layer of the same batch."""
    query, keys = torch.randn(1, 2, 3, 16), torch.randn(96, 2, 16)
    candidates = [Candidate(number, ORDINARY, 32, [range(32 * number, 32 * number + 32)]) for number in range(3)]
    batch = ragged_batch(candidates, 3, 2, keys)
    broken = keys.clone()
    broken[32:64] = torch.inf
    expected = ragged_attention(query, keys, keys, 0.3, batch)
    out = ragged_attention(query, broken, broken, 0.3, batch)
    assert out[0, 1].isnan().all()
    assert torch.equal(out[0, ::2], expected[0, ::2])
    assert torch.equal(ragged_attention(query, keys, keys, 0.3, batch), expected)


@pytest.mark.parametrize("least", [1, MOST_SCORES], ids=["sums", "ordinary"])
def test_numbers_are_float32_while_another_model_loads(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers changes the default of the process for its dtype."""
    methods: list[Fields] = [
        {"method": "default", "attention_temperature": "log_n"},
        {"method": "alibi"},
        {"method": "string", "shifted_offset": 21, "small_local_value": 4},
    ]
    readings = [reading(resolve(parse(fields), GEOMETRY, 300), 90, 4, 2) for fields in methods]
    query, keys = torch.randn(1, 4, 3, 16), torch.randn(3 * 128, 2, 16)
    places = [range(128 * number, 128 * number + 128) for number in range(3)]
    monkeypatch.setattr(ragged, "LEAST_SCORES", least)
    monkeypatch.setattr(ragged, "LEAST_DIM", 1)

    def attended() -> list[torch.Tensor]:
        choice.sums_are_fast.cache_clear()
        found = together(readings, places, lambda n: [places[n][:90]], [90] * 3, query, (keys, keys))
        return found.attend(query, (keys, keys), 0.3)

    monkeypatch.setattr(choice, "GAIN", 1e9)
    try:
        expected = attended()
        torch.set_default_dtype(torch.bfloat16)
        found = attended()
    finally:
        torch.set_default_dtype(torch.float32)
        choice.sums_are_fast.cache_clear()
    assert expected
    assert all(map(torch.equal, found, expected))


def test_no_warning_of_sparse_matrices_is_left(recwarn: pytest.WarningsRecorder) -> None:
    ragged_batch([Candidate(0, ORDINARY, 4, [range(4)])], 1, 1, torch.zeros(4, 1, 16))
    assert not recwarn.list


def test_shapes_that_fit() -> None:
    query, keys = torch.zeros(1, 8, 4, 64), torch.zeros(9, 2, 64)
    assert fits(query, keys, keys, LEAST_SCORES)
    assert fits(query, keys, keys, MOST_SCORES)
    assert not fits(query, keys, keys, LEAST_SCORES - 1)
    assert not fits(query, keys, keys, MOST_SCORES + 1)
    assert not fits(query, keys[:, :1], keys[:, :1].contiguous(), LEAST_SCORES), "keys have gaps"
    assert not fits(query, keys, torch.zeros(9, 2, 80)[..., :64], LEAST_SCORES), "values have gaps"
    one = keys[:, :1].contiguous()
    assert not fits(query, one, one, LEAST_SCORES), "eight heads read each key"
    narrow = keys[..., :32].contiguous()
    assert not fits(query[..., :32], narrow, narrow, LEAST_SCORES)
    assert fits(query[:, :4, :, :32], narrow, narrow, LEAST_SCORES), "two heads read each key"
    half = keys.half()
    assert not fits(query.half(), half, half, LEAST_SCORES)


@pytest.mark.parametrize("is_fast", [False, True])
def test_sequences_whose_keys_stay_are_summed_where_that_is_fast(
    is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "sums_are_fast", lambda *_: is_fast)
    keys, query = torch.randn(4096, 4, 64), torch.randn(1, 8, 5, 64)
    turned = reading(resolve(parse({"method": "rerope", "window": 21}), GEOMETRY, 300), 200, 8, 4)
    readings, lengths = [ORDINARY, turned, ORDINARY, None, turned], [900, 200, 30, 9, 200]
    places = [None, *(range(1024 * number, 1024 * (number + 1)) for number in range(4))]
    found = together(readings, places, lambda n: [range(n, n + lengths[n])], lengths, query, (keys, keys))
    assert found.members == ([0, 2, 1, 4] if is_fast else [1, 4])
    assert (found.ragged is not None) == is_fast
    outs = found.attend(query, (keys, keys), 0.3)
    assert [out.shape[1] for out in outs] == ([2, 2] if is_fast else [2])


def test_a_single_sequence_has_the_ordinary_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "sums_are_fast", lambda *_: True)
    keys = torch.randn(4096, 4, 64)
    found = together([ORDINARY], [None], lambda _: [range(4000)], [4000], torch.randn(1, 8, 1, 64), (keys, keys))
    assert found == (None, [])


@pytest.mark.parametrize(("factor", "expected"), [(0.5, True), (1.05, True), (1.2, False)])
def test_sums_are_left_where_they_take_longer(factor: float, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other work slows some runs down, and none is faster than it is."""
    times = iter([factor, 1.0, 9.0, 1.0, factor, 9.0, *[9.0, 9.0] * choice.ROUNDS])
    monkeypatch.setattr(choice, "_seconds", lambda run: (run(), next(times))[1])
    choice.sums_are_fast.cache_clear()
    try:
        assert choice.sums_are_fast(4, 2, 32, 32, 1) is expected
        assert choice.sums_are_fast(4, 2, 32, 32, 1) is expected, "it is timed once"
    finally:
        choice.sums_are_fast.cache_clear()
