"""Steps of one new token per sequence as tensors at fixed addresses, for captured graphs (CUDA graphs).

A graph has the addresses and the sizes of its tensors, and no other number of a step. Rows of padding are sequences of
one token each, in a page that no other sequence has. Items of padding have the sequence -1, which the kernel skips.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from patches.attention.paged.step import SPLIT, Work, gaps_of, items_of, longest, parts_of
from patches.attention.paged.tables import power_of_two
from patches.batch.slots import POSITION_BITS
from patches.batch.upload import uploaded

Division = list[np.ndarray]
"""``parts_of`` the rows of a step, in each group of layers."""

NO_ITEM = (-1, 0, 0, 0)


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

    def __init__(self, layout: _Layout, page_size: int, device: torch.device) -> None:
        self.memory = torch.zeros(layout.count, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.parts = {name: part.numpy() for name, part in layout.parts(self.memory).items()}
        self.rows = np.zeros((0, 2), np.int64)
        self.longest: Mapping[int, int] = {}
        self.division: Division = []
        self._page_size = page_size
        self._items = [np.zeros((0, 4), np.int64)] * layout.groups
        """The parts that the items of each group are made of."""

    def write(self, rows: np.ndarray, division: Division, split: int) -> None:
        """Have ``rows`` of ``DecodeSteps.of`` with their ``division``, without their tokens and pages."""
        parts, count = self.parts, len(rows)
        every = np.zeros((len(parts["slots"]), rows.shape[1]), np.int64)
        every[:count], every[count:, 0] = rows, rows[0, 0]
        slots, positions = every[:, 0], every[:, 1]
        parts["place"][:], parts["positions"][:], parts["slots"][:] = positions % self._page_size, positions, slots
        parts["encoded"][:] = slots << POSITION_BITS | positions
        for group, own in enumerate(division):
            about = parts[f"sequences {group}"].reshape(-1, 6)
            about[:, 0], about[:, 1], about[:, 2], about[:, 3] = slots, positions, np.arange(len(every)), 1
            about[:, 4:] = pages_in(every, group)
            self._divide(group, np.concatenate((own, np.tile((split, 1, 0, 0), (len(every) - count, 1)))))
        self.division, self.rows = division, rows.copy()
        self.longest = longest(zip(slots.tolist(), (positions + 1).tolist(), strict=True))

    def _divide(self, group: int, parts: np.ndarray) -> None:
        """Have the items of rows with these ``parts``. They change once in the keys of a part."""
        if np.array_equal(parts, self._items[group]):
            return
        items, self.parts[f"edges {group}"][:] = items_of(np.arange(len(parts)), parts)
        singles = self.parts[f"singles {group}"].reshape(-1, 4)
        singles[: len(items)], singles[len(items) :] = items, NO_ITEM
        self._items[group] = parts


class DecodeTable:
    """A ``step`` of single new tokens on the block tables of one group of layers, as ``Step``."""

    def __init__(self, step: DecodeStep, pages: torch.Tensor, parts: Mapping[str, torch.Tensor], group: int) -> None:
        self._step, self.block_table = step, pages
        self.page_size, self.positions, self.slots = step.page_size, step.positions, step.slots
        self.new_places = parts[f"page {group}"], parts["place"]
        sequences = parts[f"sequences {group}"].view(-1, 6)
        self._work = Work(sequences, sequences[:0], parts[f"singles {group}"].view(-1, 4), parts[f"edges {group}"])

    @property
    def longest(self) -> Mapping[int, int]:
        return self._step.longest

    def work(self, queries: int, split: int) -> Work:
        """The items, of a step without sequences of several queries.

        Raises:
            ValueError: for another ``split`` than that of the tensors.
        """
        if split != self._step.split:
            raise ValueError(f"the items of this step have {self._step.split} keys, and not {split}")
        return self._work


class DecodeStep:
    """``size`` = (rows, items of each group of layers): sequences of one new token each, over parts of ``split`` keys.

    ``fill`` writes a step; ``tables`` are it in each group of layers. ``input_ids`` and ``position_ids`` int32
    [1, rows] are the inputs of the model, the latter with slots.
    """

    def __init__(self, size: tuple[int, ...], pages: Sequence[BlockTable], page_size: int, split: int) -> None:
        rows, *items = size
        device = pages[0].pages.device
        self.size, self.split, self.page_size, self._pages = size, split, page_size, pages
        layout = _Layout(rows, items)
        self._on_device = torch.zeros(layout.count, dtype=torch.int64, device=device)
        self._now, self._next = (_Numbers(layout, page_size, device) for _ in range(2))
        parts = layout.parts(self._on_device)
        self.positions, self.slots = parts["positions"], parts["slots"]
        self.input_ids, self.position_ids = parts["ids"][None], parts["encoded"][None]
        self.longest: Mapping[int, int] = {}
        self.tables = [DecodeTable(self, each.pages[:rows], parts, group) for group, each in enumerate(pages)]

    def fill(self, rows: np.ndarray, division: Division, tokens: Sequence[int], spare: int) -> None:
        """Have ``rows`` int64 [n, 2 + 2 * groups] as in ``DecodeSteps.of``, their ``division`` and new ``tokens``.

        The tables have the pages. Rows of padding write into the page ``spare``.
        """
        self._now, self._next = self._next, self._now  # the step before has ended, but not when it was expected from
        now, count = self._now, len(rows)
        if not np.array_equal(now.rows, rows):
            now.write(rows, division, self.split)
        for group, table in enumerate(self._pages):
            columns, (first, evicted) = rows[:, 1] // self.page_size, pages_in(rows, group).T
            columns -= evicted * (columns >= first)
            page = now.parts[f"page {group}"]
            page[:count], page[count:] = table.host[np.arange(count), columns], spare
        ids = now.parts["ids"]
        ids[:count], ids[count:] = tokens, 0
        self.longest = now.longest
        self._on_device.copy_(now.memory, non_blocking=True)
        for table in self._pages:
            table.upload()

    def expect(self) -> None:
        """Write what the next step has if all sequences go on. A card still reads the numbers of this one."""
        rows = after(self._now.rows)
        division = divided(rows, self.page_size, self.split)
        pairs = zip(self._now.division, division, strict=True)
        has_as_many = all(np.array_equal(now[:, 1], later[:, 1]) for now, later in pairs)
        if has_as_many and not np.array_equal(self._next.rows, rows):
            self._next.write(rows, division, self.split)

    def division_of(self, rows: np.ndarray) -> Division:
        """``divided`` the ``rows`` of a step, which ``expect`` may have done."""
        known = self._next
        return known.division if np.array_equal(known.rows, rows) else divided(rows, self.page_size, self.split)

    @property
    def expected(self) -> Mapping[int, int] | None:
        """``longest`` of the step that ``expect`` wrote, if all its tokens go to the same pages; else None."""
        rows = after(self._now.rows)
        is_written = np.array_equal(self._next.rows, rows)
        return self._next.longest if is_written and (rows[:, 1] % self.page_size).all() else None

    def advance(self, tokens: torch.Tensor) -> None:
        """Have the ``expected`` step, whose ``tokens`` int64 [n] only the device knows. This one may not have ended."""
        now, before = self._next, self._now
        self._now, self._next = now, before
        for group in range(len(self._pages)):
            now.parts[f"page {group}"][:] = before.parts[f"page {group}"]
        now.parts["ids"][:] = 0
        self.longest = now.longest
        self._on_device.copy_(now.memory, non_blocking=True)
        self.input_ids[0, : len(tokens)].copy_(tokens)


class DecodeSteps:
    """The steps of one engine by size: powers of two, up to ``rows`` sequences.

    Sequences have up to so many pages as ``widths`` has by group of layers. ``last`` is the step that was filled last.
    """

    def __init__(self, rows: int, widths: Sequence[int], page_size: int, spare: int, device: torch.device) -> None:
        """Rows of padding write into the page ``spare``."""
        self._rows, self._page_size, self._spare, self._spare_pages = rows, page_size, spare, (spare,)
        self._tables = [BlockTable(rows, width, device) for width in widths]
        self._steps = dict[tuple[int, ...], DecodeStep]()
        self.last: DecodeStep | None = None

    def of(self, rows: np.ndarray, pages: Sequence[Mapping[int, tuple[int, ...]]], tokens: Sequence[int]) -> DecodeStep:
        """The step of ``rows`` int64 [n, 2 + 2 * groups]: slot and position, then ``pages_in`` each group.

        ``pages`` has the block tables of each group by row, without those that are the same as in the step before.
        The one before must have ended. ``tokens`` are the new ones.
        """
        count = min(power_of_two(len(rows), 1), self._rows)
        last = self.last
        division = divided(rows, self._page_size, SPLIT) if last is None else last.division_of(rows)
        items = [int(parts[:, 1].sum()) + count - len(rows) for parts in division]
        size = count, *(power_of_two(each, count) for each in items)
        if size not in self._steps:
            self._steps[size] = DecodeStep(size, self._tables, self._page_size, SPLIT)
        for table, known in zip(self._tables, pages, strict=True):
            for row, own in known.items():
                table.put(row, own)
            for row in range(len(rows), count):
                table.put(row, self._spare_pages)
        self.last = self._steps[size]
        self.last.fill(rows, division, tokens, self._spare)
        return self.last


def pages_in(rows: np.ndarray, group: int) -> np.ndarray:
    """Pages before a gap and evicted ones [n, 2], of ``rows`` of ``DecodeSteps.of``."""
    return rows[:, 2 + 2 * group : 4 + 2 * group]


def divided(rows: np.ndarray, page_size: int, split: int) -> Division:
    """``parts_of`` the ``rows`` of ``DecodeSteps.of`` in each group of layers."""
    groups, keys = rows.shape[1] // 2 - 1, rows[:, 1] + 1
    return [parts_of(keys, gaps_of(pages_in(rows, group), page_size), split) for group in range(groups)]


def after(rows: np.ndarray) -> np.ndarray:
    """``rows`` of ``DecodeSteps.of`` one token later, from the same pages."""
    later = rows.copy()
    later[:, 1] += 1
    return later


class _Layout:
    """The parts of a step's numbers in memory: int64, then int32. Those of groups of layers have their number."""

    def __init__(self, rows: int, items: Sequence[int]) -> None:
        self.groups = len(items)
        self._longs = {"place": rows, "positions": rows, "slots": rows}
        self._integers = {"ids": rows, "encoded": rows}
        for group, count in enumerate(items):
            self._longs[f"page {group}"], self._integers[f"sequences {group}"] = rows, 6 * rows
            self._integers[f"edges {group}"], self._integers[f"singles {group}"] = rows + 1, 4 * count

    @property
    def count(self) -> int:
        """Numbers of int64 that all parts take."""
        return sum(map(_aligned, self._longs.values())) + sum(map(_aligned, self._integers.values())) // 2

    def parts(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """``memory`` int64 [count] by the names of its parts."""
        parts, start = {}, 0
        for name, count in self._longs.items():
            parts[name] = memory[start : start + count]
            start += _aligned(count)
        memory, start = memory[start:].view(torch.int32), 0
        for name, count in self._integers.items():
            parts[name] = memory[start : start + count]
            start += _aligned(count)
        return parts


def _aligned(count: int) -> int:
    """Numbers of a part that begins at a multiple of 16 bytes: the kernel is compiled for the alignment."""
    return -(-count // 4) * 4
