"""Rows by slot at fixed addresses, as the kernel reads them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from patches.attention.paged.rows import BandRow, Row, Variant
from patches.batch.slots import MAX_SLOTS
from patches.batch.upload import uploaded
from patches.encoding.positions import MapRow

MOST_BANDS = 4
"""Bands of a row; no method has more."""

LEAST_DISTANCES = 1 << 20
"""Numbers for tables of biases from the first such table on: 4 MB. A new size has a new address."""


@dataclass(frozen=True)
class Pairs:
    """The rotary pairs of a head: how many, and where they are."""

    count: int = 0
    interleaved: bool = False
    offset: int = 0


class RowTables:
    """Tensors by slot. P is the number of rotary pairs up to a power of two, M = 1 + 2 bands the number of maps.

    ``slots`` int32 [slots, 5]: number of bands, kind of bias (0: none), start and length of a head's table, variant.
    ``bands`` int32 [slots, bands, 6]: chunk, low, high, first, and whether queries and keys turn. ``maps`` float32
    [slots, M, 3]: period, cap, divisor. ``pairs`` float32 [slots, M, 2, P]: groups and shifts. Map 0 is the base, and
    those of queries and keys alternate behind it. ``frequencies`` float32 [slots, 2, P]: turns per position as the sum
    of two numbers. ``biases`` float32 [slots, 2, heads]. ``distances`` float32: the tables of biases. ``temperatures``
    float64 [slots, 5]: the fields of ``TemperatureRow``.

    ``rows`` are those that the tensors have. All addresses stay, but that of ``distances`` changes with ``version``.
    """

    def __init__(self, heads: int, layout: Pairs, device: torch.device) -> None:
        width, maps = power_of_two(layout.count), 1 + 2 * MOST_BANDS
        zeros = partial(torch.zeros, device=device)
        self.layout, self.rows, self.version, self._stop = layout, dict[int, Row](), 0, 0
        self.slots = zeros(MAX_SLOTS, 5, dtype=torch.int32)
        self.bands = zeros(MAX_SLOTS, MOST_BANDS, 6, dtype=torch.int32)
        self.maps = zeros(MAX_SLOTS, maps, 3)
        self.pairs = zeros(MAX_SLOTS, maps, 2, width)
        self.frequencies = zeros(MAX_SLOTS, 2, width)
        self.biases = zeros(MAX_SLOTS, 2, heads)
        self.distances = self._former = zeros(1)
        self.temperatures = zeros(MAX_SLOTS, 5, dtype=torch.float64)

    def temperature(self, slot: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Slots and positions int64 [n] -> float64 [n], as ``TemperatureRow``."""
        constant, weight, group, shift, least = self.temperatures[slot].unbind(1)
        grouped = ((position + shift) / group).floor()
        return torch.maximum(constant + weight * grouped.log1p(), least)

    def variants(self, slots: Iterable[int]) -> tuple[Variant, ...]:
        """The variants of the kernel that compute the rows of ``slots``, in order."""
        return tuple(sorted({self.rows[slot].variant for slot in slots}))

    def write(self, rows: Mapping[int, Row]) -> None:
        """Have ``rows`` by slot: those that are not there yet are written in place.

        Raises:
            ValueError: for a row with other rotary pairs, of another model, or with too many bands.
        """
        new = {slot: row for slot, row in rows.items() if self.rows.get(slot) is not row}
        for row in new.values():
            self._check(row)
        needed = _distances(new)
        if needed and self._stop + needed > len(self.distances):
            new = self._made_room(rows)
        for slot, row in new.items():
            start = self._stop
            if row.bias is not None and row.bias.table is not None:
                self._stop += row.bias.table.numel()
                self.distances[start : self._stop].copy_(uploaded(row.bias.table.flatten(), self.distances.device))
            for target, numbers in self._numbers(row, start):
                target[slot].copy_(uploaded(numbers, target.device))
            self.rows[slot] = row

    def _made_room(self, rows: Mapping[int, Row]) -> dict[int, Row]:
        """Forget the tables of biases of all other slots, whose rows are written again when a step needs them."""
        self.rows.clear()
        self._stop = 0
        if _distances(rows) > len(self.distances):
            count = power_of_two(_distances(rows), LEAST_DISTANCES)
            self._former = self.distances  # a step that has not ended may read them
            with torch.inference_mode(False):
                self.distances = torch.zeros(count, dtype=torch.float32, device=self.distances.device)
            self.version += 1
        return dict(rows)

    def _check(self, row: Row) -> None:
        own = Pairs(len(row.frequencies), row.interleaved, row.offset)
        if row.frequencies and own != self.layout:
            raise ValueError(f"a row places its rotary pairs differently: {own}, and the model has {self.layout}")
        if len(row.bands) > MOST_BANDS:
            raise ValueError(f"a row has {len(row.bands)} bands, and the tables take {MOST_BANDS}")

    def _numbers(self, row: Row, start: int) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Each tensor by slot, and what it has for ``row``, whose table of biases begins at ``start``."""
        bias, t = row.bias, row.temperature
        kind, length = 0, 0
        if bias is not None:
            kind, length = int(bias.kind), 0 if bias.table is None else bias.table.shape[1]
            yield self.biases, torch.stack((bias.a, bias.b))
        yield self.slots, torch.tensor((len(row.bands), kind, start, length, int(row.variant)))
        bands = torch.zeros(self.bands.shape[1:], dtype=torch.int32)
        bands[: len(row.bands)] = torch.tensor([_band(row, band) for band in row.bands])
        yield self.bands, bands
        maps, pairs = (torch.zeros(each.shape[1:], dtype=torch.float32) for each in (self.maps, self.pairs))
        maps.fill_(1.0)
        pairs[:, 0] = 1.0
        for index, each in enumerate(row.maps):
            maps[index] = torch.tensor([each.period, each.cap, each.divisor], dtype=torch.float32)
            _fill_pairs(pairs[index, :, : max(self.layout.count, 1)], each)
        yield self.maps, maps
        yield self.pairs, pairs
        frequencies = torch.zeros(self.frequencies.shape[1:], dtype=torch.float32)
        turns = torch.tensor(row.frequencies, dtype=torch.float64) / (2 * math.pi)
        frequencies[0, : len(turns)] = turns.float()
        frequencies[1, : len(turns)] = (turns - turns.float().double()).float()
        yield self.frequencies, frequencies
        fields = t.constant, t.weight, t.group, t.shift, t.least
        yield self.temperatures, torch.tensor(fields, dtype=torch.float64)


def power_of_two(number: int, least: int = 16) -> int:
    """The smallest power of two from ``number`` and ``least`` on: sizes of the kernel's tensors."""
    return max(least, 1 << max(number - 1, 0).bit_length())


def _distances(rows: Mapping[int, Row]) -> int:
    """Numbers in the tables of biases."""
    biases = [row.bias for row in rows.values() if row.bias is not None]
    return sum(bias.table.numel() for bias in biases if bias.table is not None)


def _band(row: Row, band: BandRow) -> tuple[int, ...]:
    return band.chunk, band.low, band.high, band.first, *row.turned(band)


def _fill_pairs(target: torch.Tensor, of: MapRow) -> None:
    """``target`` [2, pairs] gets the groups and shifts of a map, the same for each pair or one for each."""
    for row, numbers in zip(target, (of.groups, of.shifts), strict=True):
        row.copy_(torch.tensor(numbers, dtype=torch.float32))
