"""Steps of one new token per sequence as tensors at fixed addresses, for captured graphs (CUDA graphs).

A graph has the addresses and the sizes of its tensors, and no other number of a step. Rows of padding are sequences of
one token each, in a page that no other sequence has. Items of padding have the sequence -1, which the kernel skips.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from patches.attention.paged.step import SPLIT, Item, PagedSequence, Work, longest, parts_of, sizes_of_parts
from patches.attention.paged.tables import power_of_two
from patches.batch.slots import POSITION_BITS
from patches.batch.upload import uploaded

NO_ITEM: Item = (-1, 0, 0, 0)

NEXT = np.array((0, 1, 0, 0))
"""From the row of a sequence to that of its next token."""


class BlockTable:
    """The block tables of all rows, int32 [rows, pages] in ``pages``. Only pages that changed are written."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.pages = torch.full((rows, width), -1, dtype=torch.int32, device=device)
        self.host = np.full((rows, width), -1, np.int32)
        self._rows: list[tuple[int, ...]] = [()] * rows
        self._changes: dict[int, tuple[int, int]] = {}

    def put(self, row: int, pages: tuple[int, ...]) -> None:
        """Have ``pages`` in a row from the next ``upload`` on."""
        known = self._rows[row]
        if pages is not known and pages != known:
            same = len(known) if pages[: len(known)] == known else 0  # most tables grow by a page
            self.host[row, same : len(pages)] = pages[same:]
            first, stop = self._changes.get(row, (same, len(pages)))
            self._changes[row] = min(first, same), max(stop, len(pages))
        self._rows[row] = pages

    def upload(self) -> None:
        """Write the changes of all rows at once: equally long requests all get a page in one step."""
        if not self._changes:
            return
        width = self.host.shape[1]
        spans = [(row * width + first, row * width + stop) for row, (first, stop) in self._changes.items()]
        places = np.concatenate([np.arange(*span) for span in spans])
        count = len(places)
        memory = np.zeros(count + (count + 1) // 2, np.int64)
        memory[:count], memory[count:].view(np.int32)[:count] = places, self.host.reshape(-1)[places]
        there = uploaded(torch.from_numpy(memory), self.pages.device)
        self.pages.view(-1).index_copy_(0, there[:count], there[count:].view(torch.int32)[:count])
        self._changes.clear()  # not before: a step without memory is repeated


class _Numbers:
    """All numbers of one step, in memory of the host that a card copies from by itself."""

    def __init__(self, count: int, longs: Mapping[str, int], integers: Mapping[str, int], device: torch.device) -> None:
        self.memory = _on_host(count, torch.int64, device)
        self.parts = {name: part.numpy() for name, part in _parts(self.memory, longs, integers).items()}
        self.rows = np.zeros((0, 4), np.int64)
        self.longest: Mapping[int, int] = {}
        self._ends = np.zeros(longs["page"], np.int64)

    def write(self, rows: np.ndarray, page_size: int, split: int) -> None:
        """Have ``rows`` of ``DecodeSteps.of``, without their tokens and pages."""
        parts, count = self.parts, len(rows)
        every = np.zeros((len(self._ends), 4), np.int64)
        every[:count], every[count:, 0] = rows, rows[0, 0]
        slots, positions, numbers = every[:, 0], every[:, 1], np.arange(len(every))
        parts["place"][:], parts["positions"][:], parts["slots"][:] = positions % page_size, positions, slots
        parts["encoded"][:] = slots << POSITION_BITS | positions
        about = parts["sequences"].reshape(-1, 6)
        about[:, 0], about[:, 1], about[:, 2], about[:, 3] = slots, positions, numbers, 1
        about[:, 4:] = every[:, 2:]
        self._divide(positions + 1, numbers, split)
        self.rows, self.longest = rows.copy(), longest(zip(slots.tolist(), (positions + 1).tolist(), strict=True))

    def _divide(self, keys: np.ndarray, numbers: np.ndarray, split: int) -> None:
        """Have the items of rows with ``keys`` each. They change once in ``split`` tokens of a row."""
        ends = _ends(keys, split)
        if np.array_equal(ends, self._ends):
            return
        items, self.parts["edges"][:] = parts_of(numbers, keys, split)
        self.parts["singles"].reshape(-1, 4)[: len(items)] = items
        self.parts["singles"].reshape(-1, 4)[len(items) :] = NO_ITEM
        self._ends = ends


class DecodeStep:
    """``size`` = (rows, items): sequences of one new token each, over parts of ``split`` keys.

    ``fill`` writes a step; all else is as in ``Step``. ``input_ids`` and ``position_ids`` int32 [1, rows] are the
    inputs of the model, the latter with slots.
    """

    def __init__(self, size: tuple[int, int], table: BlockTable, page_size: int, split: int) -> None:
        rows, items = size
        self.size, self.device, self._table, self._split = size, table.pages.device, table, split
        self.page_size, self.block_table = page_size, table.pages[:rows]
        longs = {"page": rows, "place": rows, "positions": rows, "slots": rows}
        integers = {"ids": rows, "encoded": rows, "sequences": 6 * rows, "edges": rows + 1, "singles": 4 * items}
        count = sum(map(_aligned, longs.values())) + sum(map(_aligned, integers.values())) // 2
        self._on_device = torch.zeros(count, dtype=torch.int64, device=self.device)
        self._now, self._next = (_Numbers(count, longs, integers, self.device) for _ in range(2))
        parts = _parts(self._on_device, longs, integers)
        self.positions, self.slots = parts["positions"], parts["slots"]
        self.new_places = parts["page"], parts["place"]
        self.input_ids, self.position_ids = parts["ids"][None], parts["encoded"][None]
        self._work = Work(
            parts["sequences"].view(rows, 6), parts["sequences"][:0], parts["singles"].view(items, 4), parts["edges"]
        )
        self.longest: Mapping[int, int] = {}

    def fill(self, rows: np.ndarray, tokens: Sequence[int], spare: int) -> None:
        """Have ``rows`` int64 [n, 4] as in ``DecodeSteps.of`` and their new ``tokens``; the table has the pages.

        Rows of padding write into the page ``spare``.
        """
        self._now, self._next = self._next, self._now  # the step before has ended, but not when it was expected from
        now, count = self._now, len(rows)
        if not np.array_equal(now.rows, rows):
            now.write(rows, self.page_size, self._split)
        columns = rows[:, 1] // self.page_size
        columns -= rows[:, 3] * (columns >= rows[:, 2])
        page, ids = now.parts["page"], now.parts["ids"]
        page[:count], page[count:] = self._table.host[np.arange(count), columns], spare
        ids[:count], ids[count:] = tokens, 0
        self.longest = now.longest
        self._on_device.copy_(now.memory, non_blocking=True)
        self._table.upload()

    def expect(self) -> None:
        """Write what the next step has if all sequences go on. A card still reads the numbers of this one."""
        rows = self._now.rows + NEXT
        before, after = (_ends(each[:, 1] + 1, self._split) for each in (self._now.rows, rows))
        if np.array_equal(before, after) and not np.array_equal(self._next.rows, rows):  # it has as many items
            self._next.write(rows, self.page_size, self._split)

    @property
    def expected(self) -> Mapping[int, int] | None:
        """``longest`` of the step that ``expect`` wrote, if all its tokens go to the same pages; else None."""
        rows = self._now.rows + NEXT
        is_written = np.array_equal(self._next.rows, rows)
        return self._next.longest if is_written and (rows[:, 1] % self.page_size).all() else None

    def advance(self, tokens: torch.Tensor) -> None:
        """Have the ``expected`` step, whose ``tokens`` int64 [n] only the device knows. This one may not have ended."""
        now, before = self._next, self._now
        self._now, self._next = now, before
        now.parts["page"][:] = before.parts["page"]
        now.parts["ids"][:] = 0
        self.longest = now.longest
        self._on_device.copy_(now.memory, non_blocking=True)
        self.input_ids[0, : len(tokens)].copy_(tokens)

    def work(self, queries: int, split: int) -> Work:
        """The items, of a step without sequences of several queries.

        Raises:
            ValueError: for another ``split`` than that of the tensors.
        """
        if split != self._split:
            raise ValueError(f"the items of this step have {self._split} keys, and not {split}")
        return self._work

    def write(self, states: torch.Tensor, pages: torch.Tensor) -> None:
        """As in ``Step``."""
        pages.index_put_(self.new_places, states)


class DecodeSteps:
    """The steps of one engine by size: powers of two, up to ``rows`` sequences of up to ``width`` pages."""

    def __init__(self, rows: int, width: int, page_size: int, spare: int, device: torch.device) -> None:
        """Rows of padding write into the page ``spare``."""
        self._rows, self._page_size, self._spare, self._spare_pages = rows, page_size, spare, (spare,)
        self._table, self._steps = BlockTable(rows, width, device), dict[tuple[int, int], DecodeStep]()

    def filled(self, sequences: Sequence[PagedSequence], tokens: Sequence[int]) -> DecodeStep:
        """The step of ``sequences`` with their new ``tokens``. The one before must have ended."""
        rows = [(s.slot, s.q_start, s.first_pages, s.evicted_pages) for s in sequences]
        return self.of(np.array(rows, np.int64), dict(enumerate(s.pages for s in sequences)), tokens)

    def of(self, rows: np.ndarray, pages: Mapping[int, tuple[int, ...]], tokens: Sequence[int]) -> DecodeStep:
        """As ``filled``, of ``rows`` int64 [n, 4]: slot, position, pages before the gap, evicted pages.

        ``pages`` has the block tables by row, without those that are the same as in the step before.
        """
        count = min(power_of_two(len(rows), 1), self._rows)
        keys = rows[:, 1] + 1
        items = int((-(-keys // sizes_of_parts(keys, SPLIT))).sum()) + count - len(rows)
        size = count, power_of_two(items, count)
        if size not in self._steps:
            self._steps[size] = DecodeStep(size, self._table, self._page_size, SPLIT)
        for row, own in pages.items():
            self._table.put(row, own)
        for row in range(len(rows), count):
            self._table.put(row, self._spare_pages)
        self._steps[size].fill(rows, tokens, self._spare)
        return self._steps[size]


def _ends(keys: np.ndarray, split: int) -> np.ndarray:
    """The last key of the last part of each row."""
    sizes = sizes_of_parts(keys, split)
    ends: np.ndarray = -(-keys // sizes) * sizes
    return ends


def _on_host(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that a card copies from by itself."""
    return torch.zeros(count, dtype=dtype, pin_memory=device.type == "cuda")


def _aligned(count: int) -> int:
    """Numbers of a part that begins at a multiple of 16 bytes: the kernel is compiled for the alignment."""
    return -(-count // 4) * 4


def _parts(memory: torch.Tensor, longs: Mapping[str, int], integers: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """``memory`` int64 [n] in parts: ``longs`` of int64, and ``integers`` of int32 behind them."""
    parts, start = {}, 0
    for name, count in longs.items():
        parts[name] = memory[start : start + count]
        start += _aligned(count)
    memory, start = memory[start:].view(torch.int32), 0
    for name, count in integers.items():
        parts[name] = memory[start : start + count]
        start += _aligned(count)
    return parts
