"""Facts about the attention of a layer: biases of masks, chosen keys and chosen blocks, against plain loops."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patches.attention.layer import Layer, bias_of, bias_of_blocks
from patches.encoding.temperature import LogRatioTemperature


@settings(max_examples=30)
@given(st.integers(1, 20), st.integers(1, 6), st.integers(1, 2), st.integers(0, 2**32 - 1))
def test_blocks_of_keys_that_a_layer_chose(keys: int, size: int, heads_per_group: int, seed: int) -> None:
    rows, groups, new, chosen = 2, 2, 3, 2
    blocks = -(-keys // size)
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(-1, blocks, (rows, groups, new, chosen), generator=generator)
    bias = bias_of_blocks(indices, size, torch.zeros(rows, groups * heads_per_group, new, 4), keys)
    assert bias.shape == (rows, groups * heads_per_group, new, keys)
    for row, head, query, key in torch.cartesian_prod(*map(torch.arange, bias.shape)).tolist():
        own = indices[row, head // heads_per_group, query].tolist()
        assert bias[row, head, query, key] == (0.0 if key // size in own else -math.inf), (row, head, query, key)


@given(st.sampled_from([torch.bool, torch.float32, torch.float16]), st.booleans(), st.integers(0, 2**32 - 1))
def test_keys_that_a_layer_excludes_or_did_not_choose(dtype: torch.dtype, chooses: bool, seed: int) -> None:
    rows, heads, new, keys = 2, 2, 3, 5
    generator = torch.Generator().manual_seed(seed)
    allowed = torch.rand(rows, 1, new, keys, generator=generator) < 0.6
    mask = allowed if dtype == torch.bool else torch.where(allowed, 0.25, torch.finfo(dtype).min).to(dtype)
    indices = torch.randint(0, keys, (rows, new, 2), generator=generator) if chooses else None
    query = torch.zeros(rows, heads, new, 4, dtype=torch.float32 if dtype == torch.bool else dtype)
    bias = bias_of(mask, indices, query, keys)
    assert bias is not None
    assert bias.dtype == query.dtype
    for row, q, key in torch.cartesian_prod(torch.arange(rows), torch.arange(new), torch.arange(keys)).tolist():
        counts = bool(allowed[row, 0, q, key]) and (indices is None or key in indices[row, q].tolist())
        expected = -math.inf if not counts else 0.0 if dtype == torch.bool else 0.25
        assert bias[row, 0, q, key] == expected, (row, q, key)


def test_a_padding_mask_alone_is_no_bias() -> None:
    query = torch.zeros(1, 1, 3, 4)
    assert bias_of(None, None, query, 3) is None
    assert bias_of(torch.ones(1, 3), None, query, 3) is None


def test_a_part_of_a_layer_has_its_rows_queries_and_keys() -> None:
    numbers = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    rows, queries, keys = slice(1, 2), slice(1, 3), slice(2, 5)
    layer = Layer(0.5, bias=numbers, relative_logits=-numbers, sinks=numbers[..., :1])
    part = layer.part(rows, queries, keys)
    assert part.bias is not None
    assert part.relative_logits is not None
    assert part.sink_logits is not None
    assert torch.equal(part.bias, numbers[1:, :, 1:3, 2:])
    assert torch.equal(part.relative_logits, -numbers[1:, :, 1:3, 2:])
    assert torch.equal(part.sink_logits, numbers[1:, :, 1:3, :1])
    by_head = Layer(0.5, sinks=torch.arange(3.0))
    assert by_head.part(rows, queries, keys) is by_head
    assert by_head.sink_logits is not None
    assert by_head.sink_logits.shape == (1, 3, 1, 1)


def test_each_change_of_the_scores_makes_a_layer_unordinary() -> None:
    assert Layer(0.5).is_ordinary
    number = torch.zeros(1)
    changes = ("softcap", 1.0), ("sinks", number), ("bias", number), ("relative_logits", number)
    for name, value in (*changes, ("temperature", LogRatioTemperature(0.1, 8))):
        assert not Layer(0.5, **{name: value}).is_ordinary, name  # type: ignore[arg-type]
