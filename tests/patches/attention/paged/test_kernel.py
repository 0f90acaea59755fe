"""The Triton kernel against the specification, on a GPU or under Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from patches import parse, resolve
from patches.attention.layer import Layer
from patches.attention.paged.compilation import DoesNotFit
from patches.attention.paged.triton import launch
from patches.attention.paged.triton.launch import Blocks
from tests.kernels import device_of_kernels
from tests.patches.attention.paged.batches import LAYERS, LENGTH, SHAPES, SMALL, WINDOWED, PagedBatch, Shape, ragged
from tests.patches.forward import relative

pytestmark = [pytest.mark.slow, pytest.mark.gpu]
DEVICE = device_of_kernels()
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 0.1}

ALL_SHAPES = {**SHAPES, "float16": Shape(dtype=torch.float16), "bfloat16": Shape(dtype=torch.bfloat16)}


def outputs(batch: PagedBatch, blocks: Blocks = SMALL) -> list[torch.Tensor]:
    """Output [new tokens, heads, value dim] of each sequence."""
    query, key_pages, value_pages, step = batch.build(DEVICE)
    tables = batch.tables(DEVICE)
    plan = launch.planned(step, tables, batch.shape.heads, batch.shape.kv_heads, blocks)
    sinks = batch.layer.sinks
    layer = replace(batch.layer, sinks=None if sinks is None else sinks.to(DEVICE))
    result = launch.attend(query, key_pages, value_pages, plan, layer)
    assert result.dtype == query.dtype
    return list(result.cpu().split([sequence.queries for sequence in step.sequences]))


def check(batch: PagedBatch, blocks: Blocks = SMALL) -> None:
    for part, expected, resolved in zip(outputs(batch, blocks), batch.expected, batch.recipes, strict=True):
        assert relative(part.to(expected.dtype), expected) < TOLERANCE[part.dtype], resolved


@pytest.mark.parametrize("shape", ALL_SHAPES)
def test_every_encoding_under_every_shape(shape: str) -> None:
    check(ragged(ALL_SHAPES[shape], Layer(0.3)))


@pytest.mark.parametrize("layer", LAYERS)
def test_every_encoding_in_every_layer(layer: str) -> None:
    batch = ragged(Shape(), LAYERS[layer], 5, seed=1)
    check(batch)


@pytest.mark.parametrize("new", [1, 30])
def test_evicted_pages(new: int) -> None:
    batch = PagedBatch(Shape(), Layer(0.3), 4, torch.Generator().manual_seed(0))
    for fields in WINDOWED:
        resolved = resolve(parse(fields), batch.shape.geometry, LENGTH)
        batch.add(resolved, 131, new, resolved.recipe.sink_window)
    assert all(sequence.evicted_pages for sequence in batch.sequences)
    check(batch)


def test_rows_that_turn_nothing_need_no_pairs() -> None:
    batch = PagedBatch(Shape(), Layer(0.3), 8, torch.Generator().manual_seed(0))
    for method in ("none", "alibi", "sandwich"):
        batch.add(resolve(parse({"method": method}), batch.shape.geometry, LENGTH), 40, 3)
    check(batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decode", [True, False])
def test_a_sequence_does_not_depend_on_its_company(dtype: torch.dtype, decode: bool) -> None:
    shape = Shape(dtype=dtype)
    crowd = ragged(shape, Layer(0.3), decode=decode)
    together = outputs(crowd)
    alone = PagedBatch(shape, Layer(0.3), 8, torch.Generator())
    index = max(range(len(crowd.sequences)), key=lambda i: crowd.sequences[i].q_stop)
    for name in ("recipes", "queries", "expected", "cached"):
        getattr(alone, name).append(getattr(crowd, name)[index])
    sequence = crowd.sequences[index]
    pages = tuple(range(len(sequence.pages)))
    alone.sequences.append(type(sequence)(0, sequence.q_start, sequence.queries, pages))
    assert torch.equal(outputs(alone)[0], together[index])


def test_float64_does_not_fit() -> None:
    with pytest.raises(DoesNotFit, match="float64"):
        outputs(ragged(Shape(dtype=torch.float64), Layer(0.3)))
