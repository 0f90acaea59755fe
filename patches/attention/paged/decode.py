"""Steps of one new token per sequence as tensors at fixed addresses, for captured graphs (CUDA graphs).

A graph has the addresses and the sizes of its tensors, and no other number of a step. Rows of padding are sequences of
one token each, in a page that no other sequence has. Items of padding have the sequence -1, which the kernel skips.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from patches.attention.paged.step import SPLIT, Item, PagedSequence, Work, about, longest, singles_of
from patches.attention.paged.tables import power_of_two
from patches.batch.slots import POSITION_BITS

NO_ITEM: Item = (-1, 0, 0, 0)


class BlockTable:
    """The block tables of all rows, int32 [rows, pages] in ``pages``. Only rows that changed are written."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.pages = torch.full((rows, width), -1, dtype=torch.int32, device=device)
        self._host = _on_host(rows * width, torch.int32, device).view(rows, width)
        self._rows: list[tuple[int, ...]] = [()] * rows

    def fill(self, sequences: Sequence[PagedSequence]) -> None:
        """Have the pages of ``sequences``, one per row."""
        for row, sequence in enumerate(sequences):
            pages, known = sequence.pages, self._rows[row]
            self._rows[row] = pages
            if pages is not known and pages != known:
                self._host[row, : len(pages)] = torch.from_numpy(np.array(pages, np.int32))
                self.pages[row, : len(pages)].copy_(self._host[row, : len(pages)], non_blocking=True)


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
        self._on_host = _on_host(count, torch.int64, self.device)
        self._host = _parts(self._on_host, longs, integers)
        parts = _parts(self._on_device, longs, integers)
        self.positions, self.slots, self._places = parts["positions"], parts["slots"], (parts["page"], parts["place"])
        self.input_ids, self.position_ids = parts["ids"][None], parts["encoded"][None]
        self._work = Work(
            parts["sequences"].view(rows, 6), parts["sequences"][:0], parts["singles"].view(items, 4), parts["edges"]
        )
        self.sequences: tuple[PagedSequence, ...] = ()
        self.longest: Mapping[int, int] = {}

    def fill(self, sequences: Sequence[PagedSequence], tokens: Sequence[int], spare: int) -> None:
        """Have ``sequences`` and their new ``tokens``; rows of padding write into the page ``spare``."""
        missing = self.size[0] - len(sequences)
        every = [*sequences, *[PagedSequence(sequences[0].slot, 0, 1, (spare,))] * missing]
        self.sequences, self.longest = tuple(every), longest(every)
        items, edges = singles_of(every, self._split)
        padding = np.tile(np.array(NO_ITEM, np.int32), (self.size[1] - len(items), 1))
        for name, numbers in {
            "page": [s.page_of(s.q_start, self.page_size) for s in every],
            "place": [s.q_start % self.page_size for s in every],
            "positions": [s.q_start for s in every],
            "slots": [s.slot for s in every],
            "ids": [*tokens, *[0] * missing],
            "encoded": [s.slot << POSITION_BITS | s.q_start for s in every],
            "sequences": about(every),
            "edges": edges,
            "singles": np.concatenate((items, padding)),
        }.items():
            self._host[name].numpy()[:] = np.asarray(numbers).reshape(-1)
        self._on_device.copy_(self._on_host, non_blocking=True)  # the step before has ended: its tokens were read
        self._table.fill(every)

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
        pages.index_put_(self._places, states)


class DecodeSteps:
    """The steps of one engine by size: powers of two, up to ``rows`` sequences of up to ``width`` pages."""

    def __init__(self, rows: int, width: int, page_size: int, spare: int, device: torch.device) -> None:
        """Rows of padding write into the page ``spare``."""
        self._rows, self._page_size, self._spare = rows, page_size, spare
        self._table, self._steps = BlockTable(rows, width, device), dict[tuple[int, int], DecodeStep]()

    def filled(self, sequences: Sequence[PagedSequence], tokens: Sequence[int]) -> DecodeStep:
        """The step of ``sequences`` with their new ``tokens``. The one before must have ended."""
        rows = min(power_of_two(len(sequences), 1), self._rows)
        items = sum(-(-sequence.q_stop // SPLIT) for sequence in sequences) + rows - len(sequences)
        size = rows, power_of_two(items, rows)
        if size not in self._steps:
            self._steps[size] = DecodeStep(size, self._table, self._page_size, SPLIT)
        self._steps[size].fill(sequences, tokens, self._spare)
        return self._steps[size]


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
