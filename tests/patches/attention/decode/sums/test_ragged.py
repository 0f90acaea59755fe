"""Sums of keys: the output that each sequence has alone, wherever its keys lie, and when they are taken."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from patches import parse, resolve
from patches.attention import reference
from patches.attention.decode import shared
from patches.attention.decode.reading import FEW, ORDINARY, Part, Reading
from patches.attention.decode.shared import LEAST_ALONE, LEAST_SCORES, MOST_SCORES, shared_calls
from patches.attention.decode.sums import columns, ragged
from patches.attention.decode.sums.columns import TOGETHER, Member
from patches.attention.decode.sums.ragged import has_sums, is_short, ragged_attention, ragged_batch
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
    return torch.cat([states[:, run.start : run.stop] for run in runs], 1)[None]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("rotary", [{}, {"interleaved": True}, {"rotary_dim": 8, "rotary_offset": 8}], ids=str)
@pytest.mark.parametrize("fields", MORE, ids=str)
def test_each_sequence_has_its_output_alone(fields: Fields, rotary: dict[str, Any], kv_heads: int) -> None:
    """Sequences of this encoding are between one of ordinary attention and one of a bias."""
    generator = torch.Generator().manual_seed(0)
    geometry = replace(GEOMETRY, **rotary)
    heads, dim, layer = 4, GEOMETRY.head_dim, Layer(0.3)
    query = torch.randn(1, heads, 6, dim, generator=generator)
    keys, values = torch.randn(2, kv_heads, 2000, dim, generator=generator).mul(2)
    methods: list[Fields] = [{"method": "default"}, fields, fields, {"method": "alibi"}]
    resolved = [resolve(parse(each), geometry, 300) for each in methods]
    members = [
        Member(number, reading(each, length, heads, kv_heads), length, runs)
        for number, each, length, runs in zip((5, 0, 3, 2), resolved, LENGTHS, RUNS, strict=True)
    ]
    before = keys[:, :1000].clone()
    batch = ragged_batch(members, 6, heads, keys, 1000)
    assert batch.members == [member.number for member in members]
    assert bool(batch.turned) == any(member.reading.turned_keys for member in members)
    keys[:, 1000:], values[:, 1000:] = torch.nan, torch.nan
    for scaling in (0.1, 0.3):
        out = ragged_attention(query, keys, values, scaling, batch)
    assert out.shape == (1, len(members), heads, dim)
    assert torch.equal(keys[:, :1000], before), "keys turn elsewhere"
    for row, member in enumerate(members):
        recipe = resolved[(5, 0, 3, 2).index(member.number)]
        own = [keys_of(states, list(member.runs)) for states in (keys, values)]
        alone = query[:, :, member.number : member.number + 1], *own, recipe, layer
        expected = reference.attend(*alone, q_start=member.length - 1)
        assert relative(out[:, row, :, None], expected) < 1e-5


@pytest.mark.parametrize(("together", "sizes"), [(TOGETHER, [121, 200]), (60, [60, 61, 200]), (0, [60, 61, 200])])
@pytest.mark.parametrize("rotary", [{}, {"interleaved": True}], ids=str)
def test_few_keys_turn_in_one_call(
    monkeypatch: pytest.MonkeyPatch, rotary: dict[str, Any], together: int, sizes: list[int]
) -> None:
    """Those of one sequence turn in one call, however many. They are not copied where they are neighbours."""
    monkeypatch.setattr(columns, "TOGETHER", together)
    generator = torch.Generator().manual_seed(0)
    resolved = resolve(parse({"method": "rerope", "window": 250}), replace(GEOMETRY, **rotary), 300)
    runs = [[range(60)], [range(100, 130), range(70, 101)], [range(200, 400)]]
    query, (keys, values) = torch.randn(1, 4, 3, 16, generator=generator), torch.randn(2, 2, 800, 16)
    lengths = [sum(map(len, own)) for own in runs]
    members = [
        Member(number, reading(resolved, lengths[number], 4, 2), lengths[number], runs[number]) for number in range(3)
    ]
    batch = ragged_batch(members, 3, 4, keys, 400)
    spans = [each.spare for each in batch.turned]
    assert [span.stop - span.start for span in spans] == sizes
    assert [span.start for span in spans] == [400, *(span.stop for span in spans[:-1])]
    assert isinstance(batch.turned[-1].source, slice)
    out = ragged_attention(query, keys, values, 0.3, batch)
    for number, own in enumerate(runs):
        alone = query[:, :, number : number + 1], keys_of(keys, own), keys_of(values, own), resolved, Layer(0.3)
        expected = reference.attend(*alone, q_start=lengths[number] - 1)
        assert relative(out[:, number, :, None], expected) < 1e-5


@pytest.mark.parametrize("fields", MORE, ids=str)
def test_bands_of_a_long_sequence_share_a_softmax(fields: Fields) -> None:
    """Each is a part, and a query has a row for each of its turns."""
    generator = torch.Generator().manual_seed(0)
    resolved, layer, length = resolve(parse(fields), GEOMETRY, 1200), Layer(0.3), FEW + 88
    query, (keys, values) = torch.randn(1, 4, 1, 16, generator=generator), torch.randn(2, 2, 900, 16).mul(2)
    own = reading(resolved, length, 4, 2)
    if fields["method"] in ("self_extend", "rerope", "dpe", "leaky_rerope"):
        assert own.turned_keys
        assert len({id(part.query) for part in own.parts}) == len(own.parts) == 2
    batch = ragged_batch([Member(0, own, length, [range(30, 330), range(400, 400 + length - 300)])], 1, 4, keys, 800)
    found = ragged_attention(query, keys, values, 0.3, batch)
    places = [*range(30, 330), *range(400, 400 + length - 300)]
    alone = query, keys[None, :, places], values[None, :, places], resolved, layer
    assert relative(found[:, 0, :, None], reference.attend(*alone, q_start=length - 1)) < 1e-5


def test_keys_and_values_may_differ_in_width() -> None:
    query, keys, values = torch.randn(1, 4, 2, 8), torch.randn(2, 64, 8), torch.randn(2, 64, 4)
    members = [Member(0, ORDINARY, 20, [range(20)]), Member(1, ORDINARY, 30, [range(32, 62)])]
    out = ragged_attention(query, keys, values, 0.3, ragged_batch(members, 2, 4, keys))
    for member, own in enumerate((slice(0, 20), slice(32, 62))):
        key, value = (states[:, own].repeat_interleave(2, 0) for states in (keys, values))
        expected = (query[0, :, member : member + 1] @ key.mT * 0.3).softmax(-1) @ value
        assert torch.allclose(out[0, member], expected[:, 0], atol=1e-6)


def test_a_sequence_without_numbers_leaves_the_others_theirs() -> None:
    """In its step, and in the next layer of the same batch."""
    query, keys = torch.randn(1, 2, 3, 16), torch.randn(2, 96, 16)
    members = [Member(number, ORDINARY, 32, [range(32 * number, 32 * number + 32)]) for number in range(3)]
    batch = ragged_batch(members, 3, 2, keys)
    broken = keys.clone()
    broken[:, 32:64] = torch.inf
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
    query, keys = torch.randn(1, 4, 3, 16), torch.randn(2, 3 * 128, 16)
    runs = [[range(128 * number, 128 * number + 128)] for number in range(3)]
    monkeypatch.setattr(shared, "LEAST_SCORES", least)

    def attended() -> list[torch.Tensor]:
        found = shared_calls(readings, runs, [90] * 3, query, (keys, keys))
        assert (found.ragged is None) == (least == MOST_SCORES)
        return found.attend(query, (keys, keys), 0.3)

    expected = attended()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = attended()
    finally:
        torch.set_default_dtype(torch.float32)
    assert expected
    assert all(map(torch.equal, found, expected))


def test_the_warning_of_sparse_matrices_is_left_out_alone() -> None:
    ragged._leave_out_warning.cache_clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        ragged_batch([Member(0, ORDINARY, 4, [range(4)])], 1, 1, torch.zeros(1, 4, 16))
        warnings.warn("Sparse CSR tensor support is in beta state", UserWarning, stacklevel=1)
        warnings.warn("another", UserWarning, stacklevel=1)
    assert [str(each.message) for each in found] == ["another"]


def test_shapes_of_sums() -> None:
    query, keys = torch.zeros(1, 8, 4, 64), torch.zeros(2, 9, 64)
    assert has_sums(query, keys, keys)
    assert not has_sums(query, keys[:, :1], keys[:, :1].contiguous()), "keys have gaps"
    assert not has_sums(query, keys, torch.zeros(2, 9, 80)[..., :64]), "values have gaps"
    assert has_sums(query, keys[:1], keys[:1])
    more = torch.zeros(1, 9, 4, 64)
    assert not has_sums(more, keys[:1], keys[:1]), "nine heads read each key"
    half = keys.half()
    assert not has_sums(query.half(), half, half)
    assert not has_sums(query.requires_grad_(), keys, keys)


def test_other_processors_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    query, keys = torch.zeros(1, 8, 4, 64), torch.zeros(2, 9, 64)
    for capability, expected in {"AVX512": True, "AVX2": True, "DEFAULT": False, "SVE256": False}.items():
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        assert has_sums(query, keys, keys) is expected


def test_many_heads_read_few_keys() -> None:
    assert is_short(1024, 32, 8, 128)
    assert not is_short(1025, 32, 8, 128)
    assert is_short(2048, 8, 2, 64)
    assert is_short(100_000, 12, 4, 64)


@pytest.mark.parametrize(
    ("has", "spare", "members"), [(False, 100, [1, 4]), (True, 41, [0, 1, 2]), (True, 20, [0, 2, 1, 4])]
)
def test_keys_turn_as_long_as_there_is_room(
    has: bool, spare: int, members: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others have the ordinary kernel, or that of sequences at equal distances."""
    monkeypatch.setattr(shared, "has_sums", lambda *_: has)
    keys, query = torch.randn(4, 4200, 64), torch.randn(1, 8, 5, 64)
    turned = reading(resolve(parse({"method": "rerope", "window": 21}), GEOMETRY, 300), 200, 8, 4)
    readings, lengths = [ORDINARY, turned, ORDINARY, None, turned], [900, 200, 30, 9, 200]
    runs = [[range(900), range(900, 1024)], *([range(1024 * number, 1024 * (number + 1))] for number in range(4))]
    assert turned.turned_keys == 21
    found = shared_calls(readings, runs, lengths, query, (keys, keys), range(4096, 4096 + spare))
    assert found.members == members
    assert (found.ragged is not None) == has
    outs = found.attend(query, (keys, keys), 0.3)
    assert sum(out.shape[1] for out in outs) == len(members)


def test_scores_that_are_read_count() -> None:
    """Those of a window, and no other keys of a long sequence."""
    keys = torch.zeros(4, 4, 64)
    window = Reading([Part(slice(100, 100 + LEAST_SCORES // 16))])

    def summed(readings: list[Reading], length: int, heads: int = 8) -> bool:
        query = torch.zeros(1, heads, 2, 64)
        lengths, runs = [length] * len(readings), [[range(length // 2), range(length // 2, length)]] * len(readings)
        found = shared_calls(readings, runs, lengths, query, (keys, keys))
        return found.ragged is not None

    assert summed([window] * 2, 1 << 20)
    assert not summed([window], 1 << 20), "a single sequence with as many scores has the ordinary kernel"
    assert not summed([ORDINARY], LEAST_ALONE // 8 - 1)
    assert summed([ORDINARY], LEAST_ALONE // 8)
    assert summed([ORDINARY], LEAST_ALONE // 8, 12)
    assert not summed([ORDINARY], LEAST_ALONE // 8, 16), "the ordinary kernel reads keys once for all heads"
    assert not summed([], 1)
    assert not summed([ORDINARY] * 2, LEAST_SCORES // 16 - 1)
    assert summed([ORDINARY] * 2, LEAST_SCORES // 16)
    assert summed([ORDINARY] * 2, MOST_SCORES // 16)
    assert not summed([ORDINARY] * 2, MOST_SCORES // 16 + 1)
