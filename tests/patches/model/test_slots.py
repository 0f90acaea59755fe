"""Slots inside position_ids, and the table that interns encodings."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patches import (
    MAX_POSITION,
    ResolvedRecipe,
    RopeGeometry,
    SlotsExhausted,
    SlotTable,
    decode,
    encode,
    parse,
    resolve,
)
from patches.attention.paged.compilation import base_of
from patches.batch.slots import MAX_SLOTS
from patches.encoding.rotary import per_pair
from tests.methods import REQUESTS, Fields, request_id

GEOMETRY = RopeGeometry(64, 64, 10_000.0, 256, 256, num_attention_heads=4)


def resolved(fields: Fields, length: int = 256) -> ResolvedRecipe:
    return resolve(parse(fields), GEOMETRY, length)


def linear(factor: float) -> ResolvedRecipe:
    return resolved({"method": "linear", "factor": factor})


@pytest.fixture
def table() -> SlotTable:
    return SlotTable(resolved({"method": "default"}), 64, torch.device("cpu"), base_of)


# Encoding


@given(st.lists(st.tuples(st.integers(0, MAX_POSITION), st.integers(0, MAX_SLOTS - 1)), min_size=1, max_size=8))
def test_positions_and_slots_come_back(pairs: list[tuple[int, int]]) -> None:
    for dtype in (torch.int32, torch.int64):
        position, slot = torch.tensor(pairs, dtype=dtype).T
        encoded = encode(position, slot)
        assert encoded.dtype == dtype
        assert int(encoded.min()) >= 0
        back = decode(encoded)
        assert torch.equal(back[0], position)
        assert torch.equal(back[1], slot)


def test_extremes_stay_positive_int32() -> None:
    position = torch.tensor([0, 1, MAX_POSITION], dtype=torch.int32)
    for slot in (0, 1, MAX_SLOTS - 1):
        encoded = encode(position, slot)
        assert encoded.dtype == torch.int32
        assert int(encoded.min()) >= 0
        assert decode(encoded)[0].tolist() == position.tolist()
        assert decode(encoded)[1].tolist() == [slot] * 3
    assert int(encode(position, MAX_SLOTS - 1).max()) == 2**31 - 1
    assert float(torch.tensor(MAX_POSITION).float()) == MAX_POSITION, "exact in float32"


def test_slot_zero_leaves_positions_as_they_are() -> None:
    position = torch.arange(10)
    assert torch.equal(encode(position, 0), position)


def test_a_slot_per_row_broadcasts() -> None:
    encoded = encode(torch.arange(5)[None], torch.tensor([[3], [0], [127]]))
    position, slot = decode(encoded)
    assert encoded.shape == (3, 5)
    assert position.tolist() == [list(range(5))] * 3
    assert slot[:, 0].tolist() == [3, 0, 127]


# The table


def test_equal_requests_share_a_slot(table: SlotTable) -> None:
    one, two = table.acquire(linear(2.0)), table.acquire(linear(2.0))
    assert one == two != 0
    assert table.acquire(linear(3.0)) not in (0, one)
    assert table.acquire(resolved({"method": "default"})) == 0
    assert table.in_use() == 3


def test_requests_of_different_lengths_with_the_same_numbers_share_a_slot(table: SlotTable) -> None:
    """Otherwise 128 short requests of different lengths would exhaust the table with one encoding."""
    dynamic = {"method": "dynamic", "factor": 2.0}
    assert table.acquire(resolved(dynamic, 100)) == table.acquire(resolved(dynamic, 200))
    assert table.acquire(resolved(dynamic, 300)) != table.acquire(resolved(dynamic, 400))
    ones = [1.0] * 32
    longrope = {"method": "longrope", "short_factor": ones, "long_factor": [2.0] * 32}
    assert table.acquire(resolved(longrope, 300)) == table.acquire(resolved(longrope, 400))


@pytest.mark.parametrize("fields", REQUESTS, ids=request_id)
def test_a_slot_holds_what_the_rotary_seam_applies(table: SlotTable, fields: Fields) -> None:
    encoding = resolved(fields, 1000)
    slot = table.acquire(encoding)
    table.upload()
    assert table[slot] == encoding
    if encoding.rotates:
        assert table.inv_freq[slot].tolist() == list(encoding.inv_freq)
        assert float(table.attention_factor[slot, 0]) == pytest.approx(encoding.attention_factor, rel=1e-7)
    else:  # cos 1, sin 0
        assert not table.inv_freq[slot].any()
        assert float(table.attention_factor[slot, 0]) == 1.0


@pytest.mark.parametrize("fields", REQUESTS, ids=request_id)
def test_keys_are_written_under_the_base(table: SlotTable, fields: Fields) -> None:
    encoding, position = resolved(fields, 1000), torch.tensor([[0, 1, 7, 999, (1 << 24) - 1]])
    for factor in range(2, MAX_SLOTS):  # the slot had other numbers before
        table.release(table.acquire(linear(float(factor))))
    table.upload()
    slot = torch.full_like(position, table.acquire(encoding))
    table.upload()
    at, inv_freq, factor = table.at_write(position, slot)
    assert inv_freq[0, 0].tolist() == list(encoding.inv_freq or [0.0] * 32)
    if encoding.rotates:
        base = per_pair(encoding.recipe.base(position[0])).float()
        assert torch.equal(at[0].expand(-1, 32), base.expand(-1, 32))
        assert float(factor[0, 0, 0]) == pytest.approx(encoding.attention_factor, rel=1e-7)


def test_encodings_that_move_positions_leave_those_of_others(table: SlotTable) -> None:
    position = torch.tensor([[0, 1, 7, 999, (1 << 24) - 1]])
    assert torch.equal(table.at_write(position, torch.zeros_like(position))[0], position[..., None])
    table.acquire(resolved({"method": "self_extend", "group_size": 4, "neighbor_window": 8}))
    table.upload()
    moved = table.at_write(position, torch.zeros_like(position))[0]
    assert torch.equal(moved, position[..., None].float().expand(-1, -1, 32))


def test_a_cleared_table_has_the_native_encoding_only(table: SlotTable) -> None:
    position = torch.tensor([[0, 7, 999]])
    moving = resolved({"method": "self_extend", "group_size": 4, "neighbor_window": 8})
    table.release(table.acquire(moving))
    table.acquire(resolved({"method": "default"}))
    table.clear()
    assert table.in_use() == 0
    assert [recipe for recipe in table.recipes if recipe is not None] == [table[0]]
    assert torch.equal(table.at_write(position, torch.zeros_like(position))[0], position[..., None])
    assert table.acquire(linear(2.0)) == 1


def test_the_native_encoding_keeps_slot_zero(table: SlotTable) -> None:
    native = table[0]
    for factor in range(1, 3 * MAX_SLOTS):
        table.release(table.acquire(linear(float(factor + 1))))
    assert table[0] == native
    assert table.acquire(native) == 0


def test_exhaustion_and_reuse(table: SlotTable) -> None:
    slots = [table.acquire(linear(1.0 + n)) for n in range(1, MAX_SLOTS)]
    assert sorted(slots) == list(range(1, MAX_SLOTS))
    with pytest.raises(SlotsExhausted, match=str(MAX_SLOTS)):
        table.acquire(linear(1000.0))
    again = table.acquire(linear(6.0))  # already interned: a full table still serves it
    table.release(again)
    assert table[again] == linear(6.0), "its first user holds it still"

    table.release(slots[40])
    reused = table.acquire(linear(1000.0))
    assert reused == slots[40]
    assert table[reused] == linear(1000.0)
    table.upload()
    assert table.inv_freq[reused].tolist() == list(linear(1000.0).inv_freq)
    with pytest.raises(SlotsExhausted):
        table.acquire(linear(1.0 + 41))  # its slot was given away
    for slot in slots:
        table.release(slot)
    others = [table.acquire(linear(2000.0 + n)) for n in range(1, MAX_SLOTS)]
    assert sorted(others) == sorted(slots), "each is taken again"


def test_encodings_are_uploaded_row_by_row_and_in_place(table: SlotTable) -> None:
    """Captured graphs have the addresses, and read other slots while a row is written."""
    table.upload()
    addresses = table.inv_freq.data_ptr(), table.attention_factor.data_ptr()
    slot = table.acquire(linear(2.0))
    assert not table.inv_freq[slot].any(), "the thread of the next forward writes it"
    table.inv_freq[0] = 7.0
    table.upload()
    assert table.inv_freq[slot].tolist() == list(linear(2.0).inv_freq)
    assert bool((table.inv_freq[0] == 7.0).all()), "it is not new"
    table.release(slot)
    table.clear()
    table.upload()
    assert table.inv_freq[0].tolist() == list(table[0].inv_freq)
    assert addresses == (table.inv_freq.data_ptr(), table.attention_factor.data_ptr())


def test_what_decides_the_operations_of_a_forward(table: SlotTable) -> None:
    """A released encoding stays in the table, but no forward of others depends on it."""
    assert not table.moves
    table.acquire(linear(2.0))
    assert not table.moves
    table.acquire(resolved({"method": "self_extend", "group_size": 4, "neighbor_window": 8}))
    assert table.moves
    assert not table.adds(None)
    learned = RopeGeometry(
        16, 0, 0.0, 256, 256, 4, family="learned", native=parse({"method": "learned"}), table_rows=256
    )
    adding = table.acquire(resolve(parse({"method": "learned_interpolation", "factor": 2.0}), learned, 256))
    table.release(adding)
    assert table.adds(None)
    assert table.adds({0, adding})
    assert not table.adds({0: 9, adding + 1: 4}.keys())
    table.clear()
    assert not table.moves
    assert not table.adds(None)


def test_a_failed_acquire_changes_nothing(table: SlotTable) -> None:
    for n in range(1, MAX_SLOTS):
        table.acquire(linear(1.0 + n))
    before = list(table.recipes), table.inv_freq.clone()
    with pytest.raises(SlotsExhausted):
        table.acquire(linear(1000.0))
    assert table.recipes == before[0]
    assert torch.equal(table.inv_freq, before[1])


def test_releasing_more_than_was_acquired_is_an_error(table: SlotTable) -> None:
    slot = table.acquire(linear(2.0))
    table.release(slot)
    with pytest.raises(ValueError, match=str(slot)):
        table.release(slot)


def test_an_empty_slot_cannot_be_read(table: SlotTable) -> None:
    with pytest.raises(IndexError):
        table[5]


def test_acquire_and_release_from_many_threads(table: SlotTable) -> None:
    def use(n: int) -> bool:
        encoding = linear(2.0 + n % 20)
        slot = table.acquire(encoding)
        same = table[slot] == encoding
        table.release(slot)
        return same

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(use, range(2000)))
    assert table.in_use() == 0
