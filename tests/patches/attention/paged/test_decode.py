"""Tables and steps at fixed addresses, against the specification and without Triton."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from patches import ResolvedRecipe, parse, resolve
from patches.attention.layer import Layer
from patches.attention.paged.compilation import compiled
from patches.attention.paged.decode import BlockTable, DecodeSteps
from patches.attention.paged.rows import BandRow, Row, Variant
from patches.attention.paged.step import PagedSequence, about, items_of, parts_of, step_of
from patches.attention.paged.tables import MOST_BANDS, Pairs, RowTables
from patches.attention.paged.triton import launch
from tests.methods import Fields
from tests.patches.attention.paged import by_tables
from tests.patches.attention.paged.batches import (
    CPU,
    LAYERS,
    LENGTH,
    SHAPES,
    SMALL,
    WINDOWED,
    PagedBatch,
    Shape,
    filled,
    ragged,
)
from tests.patches.forward import relative

ALL_LAYERS = {"plain": Layer(0.3), **LAYERS}


def check(batch: PagedBatch) -> None:
    query, key_pages, value_pages, step = batch.build()
    plan = launch.planned(step, batch.tables(), batch.shape.heads, batch.shape.kv_heads, SMALL)
    result = by_tables.attend(query, key_pages, value_pages, plan, batch.layer)
    parts = result.split([sequence.queries for sequence in step.sequences])
    for part, expected, resolved in zip(parts, batch.expected, batch.recipes, strict=True):
        assert relative(part, expected) < 1e-5, resolved


@pytest.mark.parametrize("shape", SHAPES)
def test_tables_have_every_encoding_under_every_shape(shape: str) -> None:
    check(ragged(SHAPES[shape], Layer(0.3)))


@pytest.mark.parametrize("layer", ALL_LAYERS)
def test_tables_have_every_encoding_in_every_layer(layer: str) -> None:
    check(ragged(Shape(), ALL_LAYERS[layer], 5, seed=1))


# The step


def decoding(layer: Layer, page_size: int = 8) -> PagedBatch:
    batch = ragged(Shape(), layer, page_size, seed=2, decode=True)
    for fields in WINDOWED:
        resolved = resolve(parse(fields), batch.shape.geometry, LENGTH)
        batch.add(resolved, 131, 1, resolved.recipe.sink_window)
    return batch


@pytest.mark.parametrize("layer", ["plain", "all"])
def test_one_step_serves_batches_of_other_lengths_slots_and_pages(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place, with rows and items of padding, and places of new keys."""
    monkeypatch.setattr("patches.attention.paged.decode.SPLIT", SMALL.split)
    batch = decoding(ALL_LAYERS[layer])
    query, key_pages, value_pages, step = batch.build()
    tables, spare = batch.tables(), len(key_pages)
    key_pages, value_pages = (torch.cat((pages, pages[:1])) for pages in (key_pages, value_pages))
    steps = DecodeSteps(64, [40], 8, spare, CPU)
    count, addresses = len(step.sequences), set[tuple[int, ...]]()
    for chosen in (list(range(count)), [3, 0, 5, *range(6, count)], list(range(count))[::-1]):
        sequences = [step.sequences[index] for index in chosen]
        decode = filled(steps, sequences, [7] * len(chosen))
        table = decode.tables[0]
        padding = decode.size[0] - len(chosen)
        assert padding > 0
        states = [torch.randn(decode.size[0], 2, 16) for _ in range(2)]
        written = [pages.clone() for pages in (key_pages, value_pages)]
        for state, pages in zip(states, written, strict=True):
            pages.index_put_(table.new_places, state)
        for row, sequence in enumerate(sequences):
            at = sequence.pages[sequence.q_start // 8 - sequence.evicted_pages], sequence.q_start % 8
            assert torch.equal(written[0][at], states[0][row])
            assert torch.equal(written[1][at], states[1][row])
        plan = launch.planned(table, tables, 4, 2, SMALL)
        assert plan.sequences[: len(chosen)].tolist() == about(sequences).tolist()
        rows = torch.cat((torch.cat([query[index : index + 1] for index in chosen]), torch.zeros(padding, 4, 16)))
        result = by_tables.attend(rows, key_pages, value_pages, plan, batch.layer)
        assert bool(result.isfinite().all())
        for row, index in enumerate(chosen):
            assert relative(result[row : row + 1], batch.expected[index]) < 1e-5
        addresses.add(tuple(each.data_ptr() for each in (decode.input_ids, plan.sequences, plan.singles, plan.edges)))
    assert len(addresses) < 3, "the same size has the same tensors"
    assert all(address % 16 == 0 for each in addresses for address in each)


def test_a_step_has_the_inputs_of_the_model() -> None:
    steps = DecodeSteps(3, [4], 8, 99, CPU)
    step = filled(steps, [PagedSequence(5, 17, 1, (4, 2, 7)), PagedSequence(1, 0, 1, (3,))], [11, 12])
    assert step.size == (2, 2)
    assert step.input_ids.tolist() == [[11, 12]]
    assert step.position_ids.tolist() == [[5 << 24 | 17, 1 << 24]]
    assert step.longest == {5: 18, 1: 1}
    sequences = [PagedSequence(5, 1024, 1, tuple(range(129)), 1, 0)] * 3
    with pytest.raises((ValueError, RuntimeError)):
        filled(steps, sequences, [1, 2, 3])  # more pages than the tables have
    three = filled(steps, [PagedSequence(2, 3, 1, (1,))] * 3, [1, 2, 3])
    assert three.size == (3, 4), "as many rows as there may be, and items of padding"
    with pytest.raises(ValueError, match="128 keys, and not 32"):
        three.tables[0].work(1, 32)


# The tables


SANDWICH: Fields = {"method": "sandwich"}


def recipes(*fields: Fields) -> list[ResolvedRecipe]:
    return [resolve(parse(each), Shape().geometry, LENGTH) for each in fields]


def test_only_new_rows_are_written_in_place() -> None:
    tables = RowTables(4, Pairs(4), CPU)
    default, string, alibi = (
        compiled(each, LENGTH) for each in recipes({"method": "default"}, {"method": "string"}, {"method": "alibi"})
    )
    tables.write({0: default, 5: string})
    addresses = [each.data_ptr() for each in (tables.slots, tables.bands, tables.maps, tables.biases)]
    tables.slots[0, 0] = 77
    tables.write({0: default, 5: alibi})
    assert tables.slots[0, 0] == 77, "it is not new"
    linear = Variant.BIASED | Variant.LINEAR
    assert tables.slots[5].tolist() == [1, 1, 0, 0, linear]
    assert addresses == [each.data_ptr() for each in (tables.slots, tables.bands, tables.maps, tables.biases)]
    assert (tables.variants([0]), tables.variants([5, 0])) == ((Variant.PLAIN,), (Variant.PLAIN, linear))


def test_tables_of_biases_share_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patches.attention.paged.tables.LEAST_DISTANCES", 1 << 13)
    tables, (resolved, other) = RowTables(4, Pairs(4), CPU), recipes(SANDWICH, SANDWICH | {"dim": 64})

    def held(slot: int) -> torch.Tensor:
        _, _, start, length, _ = tables.slots[slot].tolist()
        return tables.distances[start : start + 4 * length]

    short, long = compiled(resolved, 512), compiled(resolved, 1024)
    tables.write({1: short})
    assert (tables.version, len(tables.distances)) == (1, 1 << 13)
    for _ in range(9):  # room is made without another address
        for slot, row in ((2, long), (3, compiled(other, 1024)), (1, compiled(resolved, 512))):
            tables.write({slot: row})
            assert row.bias is not None
            assert row.bias.table is not None
            assert torch.equal(held(slot), row.bias.table.flatten())
    assert tables.version == 1
    every = {slot: compiled(each, 1024) for slot, each in enumerate((resolved, other, resolved))}
    tables.write(every)
    assert (tables.version, len(tables.distances)) == (2, 1 << 14), "they do not fit together"
    for slot, row in every.items():
        assert row.bias is not None
        assert row.bias.table is not None
        assert torch.equal(held(slot), row.bias.table.flatten())


def test_rows_of_another_model_are_refused() -> None:
    (default,) = recipes({"method": "default"})
    with pytest.raises(ValueError, match="places its rotary pairs differently"):
        RowTables(4, Pairs(4, interleaved=True), CPU).write({0: compiled(default, LENGTH)})
    row = replace(compiled(default, LENGTH), bands=(BandRow(),) * (MOST_BANDS + 1))
    assert isinstance(row, Row)
    RowTables(4, Pairs(4), CPU).write({0: replace(row, bands=row.bands[1:])})
    with pytest.raises(ValueError, match="5 bands, and the tables take 4"):
        RowTables(4, Pairs(4), CPU).write({0: row})


def test_parts_grow_with_the_length_and_cover_all_keys() -> None:
    keys = np.array([1, 128, 1024, 1025, 8192, 8193, 20_000])
    parts = parts_of(keys, np.zeros((len(keys), 2), np.int64), 128)
    assert parts[:, 0].tolist() == [128, 128, 128, 256, 256, 512, 512]
    items, edges = items_of(np.arange(len(keys)), parts)
    for row, (first, stop) in enumerate(itertools.pairwise(edges)):
        own = items[first:stop]
        assert (own[:, 0] == row).all()
        assert own[0, 2] == 0
        assert (own[1:, 2] == own[:-1, 3]).all()
        assert own[-1, 2] < keys[row] <= own[-1, 3]


def test_gaps_have_no_parts() -> None:
    """Parts cover all keys before and behind a gap, and none that lies within it."""
    generator = np.random.default_rng(0)
    for _ in range(300):
        first, evicted = generator.integers(0, 20), generator.integers(0, 3000)
        gap = np.array([first, first + evicted]) * 8
        keys = int(gap[1] + generator.integers(1, 3000))
        parts = parts_of(np.array([keys]), gap[None], 32)
        items, _ = items_of(np.array([0]), parts)
        starts, stops = items[:, 2], items[:, 3]
        assert parts[0, 1] == len(items)
        assert (starts[1:] >= stops[:-1]).all()
        covered = np.concatenate([np.arange(*each) for each in items[:, 2:]])
        cached = np.concatenate((np.arange(gap[0]), np.arange(gap[1], keys)))
        assert np.isin(cached, covered).all()
        assert all(start < gap[0] or stop > gap[1] for start, stop in zip(starts, stops, strict=True))
        assert parts[0, 0] == parts_of(np.array([len(cached)]), np.zeros((1, 2), np.int64), 32)[0, 0]


def test_pages_survive_an_upload_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_memory(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    table = BlockTable(2, 4, CPU)
    table.put(0, (3, 1))
    with monkeypatch.context() as patching:
        patching.setattr("patches.attention.paged.decode.uploaded", without_memory)
        with pytest.raises(torch.OutOfMemoryError):
            table.upload()
    for row, pages in ((0, (3, 1)), (1, (5,)), (0, (3, 1, 2))):
        table.put(row, pages)
    table.upload()
    assert table.pages.tolist() == [[3, 1, 2, -1], [5, -1, -1, -1]]


def test_items_cover_every_new_token_once() -> None:
    counts = (1, 2, 3, 4, 5, 9, 1)
    step = step_of([PagedSequence(0, 40, count, tuple(range(8))) for count in counts], 8, CPU)
    work = step.work(4, 32)
    chunks = [(number, first + n) for number, first, *_ in work.chunks.tolist() for n in range(4)]
    tokens = [(number, n) for number, count in enumerate(counts) for n in range(count) if count > 1]
    assert [(number, n) for number, n in chunks if n < counts[number]] == tokens
    assert {number for number, *_ in work.singles.tolist()} == {0, 6}
    assert work.sequences[:, 2].tolist() == [sum(counts[:number]) for number in range(len(counts))]


def test_only_new_pages_are_written() -> None:
    table = BlockTable(2, 4, CPU)
    for row, pages in ((0, (3, 1)), (1, (5, 6))):
        table.put(row, pages)
    table.upload()
    table.pages[:, :2] = 77
    for row, pages in ((0, (3, 1, 2)), (1, (5, 6, 7)), (1, (5, 6, 7, 8))):
        table.put(row, pages)
    table.upload()
    assert table.pages.tolist() == [[77, 77, 2, -1], [77, 77, 7, 8]]
    table.put(1, (5, 9))
    table.upload()
    assert table.pages[1, :2].tolist() == [5, 9], "another sequence"
