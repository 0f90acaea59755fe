"""Eager paged attention against the specification, in ragged batches of all encodings."""

from __future__ import annotations

import pytest
import torch

from patches import parse, resolve
from patches.attention.layer import Layer
from patches.attention.paged import eager
from patches.attention.paged.compilation import DoesNotFit
from patches.attention.paged.step import PagedSequence, step_of
from patches.encoding.masks import ChunkRange, DistanceRange
from patches.encoding.temperature import FloorLogTemperature
from tests.patches.attention.paged.batches import LENGTH, WINDOWED, PagedBatch, Shape, ragged
from tests.patches.forward import relative

TOLERANCE = {torch.float32: 5e-6, torch.float64: 5e-6, torch.bfloat16: 0.1}
"""Tables of cos and sin are float32 in the specification; in bfloat16, keys are rounded once more."""

SHAPES = {
    "plain": Shape(),
    "multi_head": Shape(kv_heads=4),
    "one_kv_head": Shape(heads=6, kv_heads=1),
    "interleaved": Shape(rotary_dim=16, interleaved=True),
    "latent": Shape(kv_heads=4, head_dim=24, value_dim=12, rotary_dim=8, offset=16, interleaved=True),
    "reversed": Shape(reverses=True),
    "float64": Shape(dtype=torch.float64),
    "bfloat16": Shape(dtype=torch.bfloat16),
}
SINKS = torch.linspace(-1.0, 2.0, 4)
LAYERS = {
    "plain": Layer(0.3),
    "softcap": Layer(0.3, softcap=2.0),
    "sinks": Layer(0.3, sinks=SINKS),
    "window": Layer(0.3, DistanceRange(0, 13)),
    "chunk": Layer(0.3, ChunkRange(16, 0, 1)),
    "temperature": Layer(0.3, temperature=FloorLogTemperature(0.5, 8, 1)),
    "all": Layer(0.3, DistanceRange(0, 21), 3.0, SINKS, temperature=FloorLogTemperature(0.5, 8, 1)),
}


def check(batch: PagedBatch) -> None:
    query, key_pages, value_pages, step = batch.build()
    result = eager.attend(query, key_pages, value_pages, step, batch.rows(), batch.layer)
    assert result.dtype == query.dtype
    parts = result.split([sequence.queries for sequence in step.sequences])
    for part, expected, resolved in zip(parts, batch.expected, batch.recipes, strict=True):
        assert relative(part.to(expected.dtype), expected) < TOLERANCE[query.dtype], resolved


@pytest.mark.parametrize("shape", SHAPES)
def test_every_encoding_under_every_shape(shape: str) -> None:
    check(ragged(SHAPES[shape], Layer(0.3)))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("page_size", [1, 5, 256])
def test_every_encoding_in_every_layer(layer: str, page_size: int) -> None:
    check(ragged(Shape(), LAYERS[layer], page_size, seed=page_size))


@pytest.mark.parametrize("new", [1, 30])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_evicted_pages(new: int, page_size: int) -> None:
    batch = PagedBatch(Shape(), Layer(0.3), page_size, torch.Generator().manual_seed(page_size))
    for fields in WINDOWED:
        resolved = resolve(parse(fields), batch.shape.geometry, LENGTH)
        batch.add(resolved, 131, new, resolved.recipe.sink_window)
        batch.add(resolved, 30, new, resolved.recipe.sink_window)
    assert any(sequence.evicted_pages for sequence in batch.sequences)
    check(batch)


def test_a_layer_that_chooses_keys_does_not_fit() -> None:
    layer = Layer(0.3, bias=torch.zeros(1, 1, 1, 1))
    query, key_pages, value_pages, step = ragged(Shape(), Layer(0.3)).build()
    with pytest.raises(DoesNotFit, match="choose keys"):
        eager.attend(query, key_pages, value_pages, step, {}, layer)


def test_steps_that_do_not_fit_their_pages_are_refused() -> None:
    for queries, pages, message in ((0, (1, 2, 3), "0 new tokens"), (3, (1, 2), "need 3 pages of 4")):
        with pytest.raises(ValueError, match=message):
            step_of([PagedSequence(0, 8, queries, pages)], 4, torch.device("cpu"))
    with pytest.raises(ValueError, match="at least one"):
        step_of([], 4, torch.device("cpu"))
