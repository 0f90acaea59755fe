"""Each work item has the code of one launch, by its row and by the keys that turn."""

from __future__ import annotations

import pytest
import torch

from patches.attention.layer import Layer
from patches.attention.paged.decode import NO_ITEM
from patches.attention.paged.rows import Row, Variant
from patches.attention.paged.triton.codes import NOBODY, TURNING, codes_of, launches_of
from patches.attention.paged.triton.launch import Blocks, planned
from tests.patches.attention.paged.batches import Shape, ragged

SPLIT = 8


def turns(row: Row, q_idx: int, low: int, high: int) -> bool:
    """True if a band of ``row`` turns a key of low .. high - 1 that the query reaches."""
    kv_idx = torch.arange(low, high)
    bands = [band for band in row.bands if row.turned(band)[1]]
    return any(bool(band(torch.tensor(q_idx), kv_idx).any()) for band in bands)


def test_parts_have_the_code_of_their_keys() -> None:
    batch = ragged(Shape(), Layer(0.3), decode=True)
    *_, step = batch.build()
    work, tables = step.work(8, SPLIT), batch.tables()
    items = torch.cat((work.singles, torch.tensor([NO_ITEM], dtype=torch.int32)))
    codes = codes_of(items, work.sequences, tables, by_keys=True)
    found = codes.tolist()
    assert codes.dtype == torch.int32
    assert found.pop() == NOBODY
    rows, expected = batch.rows(), []
    for number, _, low, high in work.singles.tolist():
        sequence = step.sequences[number]
        row = rows[sequence.slot]
        expected.append(int(row.variant) + TURNING * turns(row, sequence.q_start, low, min(high, sequence.q_stop)))
    assert found == expected
    launched = {launch.code for launch in launches_of({row.variant for row in rows.values()}, split=True)}
    assert launched == set(found)
    assert {code & TURNING for code in found if code & Variant.KEYS} == {0, TURNING}


def test_chunks_have_the_code_of_their_row() -> None:
    batch = ragged(Shape(), Layer(0.3))
    *_, step = batch.build()
    work, rows = step.work(8, SPLIT), batch.rows()
    found = codes_of(work.chunks, work.sequences, batch.tables(), by_keys=False).tolist()
    assert found == [int(rows[step.sequences[number].slot].variant) for number in work.chunks[:, 0].tolist()]


def test_parts_have_no_room_for_rows_of_padding() -> None:
    """A block has 16 rows at least. With a key head for each head, 15 of them held nothing, in gigabytes."""
    batch = ragged(Shape(), Layer(0.3), decode=True)
    *_, step = batch.build()
    for heads, kv_heads in ((2, 2), (6, 2)):
        plan = planned(step, batch.tables(), heads, kv_heads, Blocks(32, 16, SPLIT))
        sizes = [tuple(part.shape) for part in plan.parts(12)]
        shape = len(plan.singles), kv_heads, heads // kv_heads
        assert sizes == [(*shape, 12), shape, shape]


@pytest.mark.parametrize("split", [True, False])
def test_launches_differ_by_code_and_registers(split: bool) -> None:
    variants = [Variant.PLAIN, Variant.TURNED, Variant.TURNED | Variant.KEYS, Variant.BIASED]
    launches = list(launches_of(variants, split=split))
    assert len({launch.code for launch in launches}) == len(launches) == (5 if split else 4)
    assert [launch.turns_keys for launch in launches] == [False] * 2 + ([False] if split else []) + [True, False]
