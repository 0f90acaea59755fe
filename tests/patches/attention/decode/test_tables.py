"""Tables that decode steps share: the numbers of tables made anew, and no hindrance to training."""

from __future__ import annotations

import pytest
import torch

from benchmarks.typical import typical
from patches import RopeGeometry, parse, resolve
from patches.attention import reference
from patches.attention.decode import tables
from patches.attention.decode.reading import reading_of
from patches.attention.decode.single_query import read
from patches.attention.decode.tables import (
    BLOCK,
    MOST_DISTANCES,
    MOST_POSITIONS,
    NARROW,
    bias_by_distance,
    moves,
    shared_rotation,
)
from patches.attention.fused import attend
from patches.attention.layer import Layer
from patches.attention.states import SegmentStates
from patches.batch.segments import Batch
from patches.encoding.bands import PositionMap
from patches.encoding.masks import CAUSAL, ChunkRange, DistanceRange, LayerMask
from patches.encoding.positions import Grouped, GroupedPairs, InChunk, Shifted, Stretched
from patches.encoding.rotary import per_pair
from tests.patches.forward import relative

GEOMETRY = RopeGeometry(16, 16, 1e4, 64, 64, 4)
INTERLEAVED = RopeGeometry(16, 16, 1e4, 64, 64, 4, interleaved=True)
CPU = torch.device("cpu")
BIASES = ["alibi", "kerple_log", "kerple_power", "sandwich", "t5_bias"]


@pytest.mark.parametrize("geometry", [GEOMETRY, INTERLEAVED], ids=["half-split", "interleaved"])
def test_a_rotation_is_shared_by_equal_positions(geometry: RopeGeometry) -> None:
    resolved, other = (resolve(parse(pe), geometry, 64) for pe in ("default", "linear:2"))
    by = torch.tensor([[-3], [0], [40]])
    fresh = shared_rotation(by, resolved)
    with torch.inference_mode():
        shared = shared_rotation(by.clone(), resolved)
        assert shared_rotation(by.clone(), resolved) is shared
        long = torch.arange(NARROW + 1)[:, None]
        assert shared_rotation(long, resolved) is shared_rotation(long.clone(), resolved)
        different = [
            shared_rotation(by + 1, resolved),
            shared_rotation(by + 0.5, resolved),
            shared_rotation(by, other),
        ]
        long = torch.arange(MOST_POSITIONS + 1)[:, None]
        assert shared_rotation(long, resolved) is not shared_rotation(long, resolved)
    assert all(torch.equal(*pair) for pair in zip(fresh, shared, strict=True))
    assert not any(torch.equal(fresh[0], table[0]) for table in different)
    assert shared_rotation(by, resolved) is not shared, "autograd refuses tensors of inference"


@pytest.mark.parametrize("to", [Grouped(3, 5), GroupedPairs((2, 7), (1, 0)), Stretched(2.5), InChunk(40)], ids=str)
@pytest.mark.parametrize(
    ("start", "stop"), [(0, 1), (BLOCK - 1, BLOCK), (BLOCK - 1, BLOCK + 1), (3, 2 * BLOCK + 9), (9, 700)]
)
def test_moves_are_those_of_the_maps(to: PositionMap, start: int, stop: int) -> None:
    positions = torch.arange(start, stop)
    expected = per_pair(to(positions)) - per_pair(Shifted(2)(positions))
    with torch.inference_mode():
        shared = moves(to, Shifted(2), range(start, stop), CPU)
    for found in (shared, moves(to, Shifted(2), range(start, stop), CPU)):
        assert found.shape == expected.shape
        assert torch.equal(found.double(), expected.double())


@pytest.mark.parametrize("name", ["self_extend", "dpe"])
def test_a_table_of_inference_leaves_other_modes_alone(name: str) -> None:
    """Gradients of functions, compilation, and another default device have tensors without numbers."""
    resolved = resolve(parse(typical(GEOMETRY)[name]), GEOMETRY, 300)
    query, key = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 200, 16)

    def one(query: torch.Tensor) -> torch.Tensor:
        return attend(query, key, key, resolved, Batch([]), Layer(0.3), q_start=199)

    for store in (tables._block, tables._narrow, tables._wide):
        store.cache_clear()
    cold = torch.func.grad(lambda query: one(query).sum())(query)
    compiled = torch.compile(one, backend="eager")(query)
    with torch.device("meta"):
        elsewhere = one(query)
    with torch.inference_mode():
        expected = one(query)
    assert torch.equal(torch.func.grad(lambda query: one(query).sum())(query), cold)
    assert torch.equal(compiled, expected)
    assert torch.equal(elsewhere, expected)


def test_a_model_that_loads_meanwhile_changes_no_table() -> None:
    """transformers sets the default dtype of the process while it loads."""
    resolved, by = resolve(parse("linear:3"), GEOMETRY, 64), torch.tensor([[200], [201]])
    expected = shared_rotation(by, resolved)
    with torch.inference_mode():
        torch.set_default_dtype(torch.bfloat16)
        try:
            shared = shared_rotation(by, resolved)
        finally:
            torch.set_default_dtype(torch.float32)
        assert shared_rotation(by, resolved) is shared
    assert all(torch.equal(*pair) for pair in zip(shared, expected, strict=True))


@pytest.mark.parametrize("mask", [CAUSAL, DistanceRange(0, 13), ChunkRange(50, 0, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BIASES)
def test_a_shared_bias_is_that_of_the_states(name: str, dtype: torch.dtype, mask: LayerMask) -> None:
    """Layers with windows or chunks too: the keys that a query reaches are all covered."""
    resolved = resolve(parse(typical(GEOMETRY)[name]), GEOMETRY, 300)
    (band,) = resolved.recipe.bands
    for past in (0, 12, 13, 120):
        query, key = torch.zeros(1, 4, 1, 16, dtype=dtype), torch.zeros(1, 4, past + 1, 16, dtype=dtype)
        states = SegmentStates(query, key, key, resolved, Batch([]), Layer(0.3, mask), past, 0)
        columns = dict(states.reached())[band]
        expected = states.bias([band], *states.indices(past, 1, columns))
        with torch.inference_mode():
            (part,) = reading_of(states).parts
        assert part.bias is not None
        assert torch.equal(part.bias, expected)


@pytest.mark.parametrize("name", BIASES)
def test_a_bias_by_distance_is_that_of_the_positions(name: str) -> None:
    bias = resolve(parse(typical(GEOMETRY)[name]), GEOMETRY, 64).recipe.score_bias
    assert bias is not None
    with torch.inference_mode():
        for distances in (range(1), range(7), range(3, 64), range(1, 65), range(5, MOST_DISTANCES + 9)):
            q_idx = torch.tensor([[distances.stop + 20]])
            expected = bias(q_idx, q_idx - torch.arange(distances.stop - 1, distances.start - 1, -1)[None])
            for _ in range(2):
                assert torch.equal(bias_by_distance(bias, distances, CPU), expected)


@pytest.mark.parametrize("name", [*BIASES, "self_extend", "dual_chunk", "lm_infinite"])
def test_decoding_with_shared_tables_equals_the_reference(name: str) -> None:
    """Steps follow each other, as in the engine; afterwards the same encoding has gradients."""
    generator = torch.Generator().manual_seed(0)
    resolved, layer = resolve(parse(typical(GEOMETRY, reach=4)[name]), GEOMETRY, 200), Layer(0.3)
    query = torch.randn(1, 4, 1, 16, generator=generator)
    key, value = torch.randn(2, 1, 2, 200, 16, generator=generator)
    for past in range(150, 200, 7):
        seen = key[:, :, : past + 1], value[:, :, : past + 1]
        expected = reference.attend(query, *seen, resolved, layer, q_start=past)
        with torch.inference_mode():
            reading = reading_of(SegmentStates(query, *seen, resolved, Batch([]), layer, past, 0))
            assert relative(read(query, *seen, layer.scaling, reading), expected) < 1e-5
    learned = query.clone().requires_grad_()
    reading = reading_of(SegmentStates(learned, key, value, resolved, Batch([]), layer, 199, 0))
    read(learned, key, value, layer.scaling, reading).sum().backward()
    assert learned.grad is not None
