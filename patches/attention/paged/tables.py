"""Rows stacked by slot, as the kernel reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from patches.attention.paged.rows import BandRow, MapRow, Row

MOST_BANDS = 4
"""Bands of the tables; the kernel is compiled anew for an encoding that has more."""


@dataclass(frozen=True)
class RowTables:
    """Tensors by slot. P is the number of rotary pairs up to a power of two, M = 1 + 2 bands the number of maps.

    ``slots`` int32 [slots, 4]: number of bands, kind of bias (0: none), first number of its table, length of a head's
    part of it. ``bands`` int32 [slots, bands, 6]: chunk, low, high, first, and whether queries and keys turn. ``maps``
    float32 [slots, M, 3]: period, cap, divisor. ``pairs`` float32 [slots, M, 2, P]: groups and shifts. Map 0 is the
    base, and those of queries and keys alternate behind it. ``frequencies`` float32 [slots, 2, P]: turns per position
    as the sum of two numbers. ``biases`` float32 [slots, 2, heads]. ``distances`` float32: the tables of biases.
    ``temperatures`` float64 [slots, 5]: the fields of ``TemperatureRow``.
    """

    slots: torch.Tensor
    bands: torch.Tensor
    maps: torch.Tensor
    pairs: torch.Tensor
    frequencies: torch.Tensor
    biases: torch.Tensor
    distances: torch.Tensor
    temperatures: torch.Tensor
    num_pairs: int
    interleaved: bool
    offset: int
    turns: bool
    """True if some row turns queries or keys."""
    by_pair: bool
    """True if some map differs by pair."""
    has_bias: bool

    def temperature(self, slot: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Slots and positions int64 [n] -> float64 [n], as ``TemperatureRow``."""
        constant, weight, group, shift, least = self.temperatures[slot].unbind(1)
        grouped = ((position + shift) / group).floor()
        return torch.maximum(constant + weight * grouped.log1p(), least)


def stacked(rows: Mapping[int, Row], heads: int, device: torch.device) -> RowTables:
    """The tables of ``rows`` by slot, for a model with ``heads`` query heads. Slots without a row are unused.

    Raises:
        ValueError: when rows place their rotary pairs differently: they are of different models.
    """
    rotating = [row for row in rows.values() if row.frequencies]
    places = {(len(row.frequencies), row.interleaved, row.offset) for row in rotating} or {(0, False, 0)}
    if len(places) > 1:
        raise ValueError(f"rows place their rotary pairs differently: {sorted(places)}")
    num_pairs, interleaved, offset = places.pop()
    width, most = power_of_two(num_pairs), max(MOST_BANDS, *(len(row.bands) for row in rows.values()))
    count = max(rows) + 1
    slots, bands = torch.zeros(count, 4, dtype=torch.int32), torch.zeros(count, most, 6, dtype=torch.int32)
    maps, pairs = torch.ones(count, 1 + 2 * most, 3), torch.zeros(count, 1 + 2 * most, 2, width)
    pairs[:, :, 0] = 1.0
    frequencies, biases, distances = torch.zeros(count, 2, width), torch.zeros(count, 2, heads), [torch.zeros(1)]
    temperatures = torch.ones(count, 5, dtype=torch.float64)
    for slot, row in rows.items():
        t = row.temperature
        temperatures[slot] = torch.tensor([t.constant, t.weight, t.group, t.shift, t.least], dtype=torch.float64)
        slots[slot, 0] = len(row.bands)
        for index, band in enumerate(row.bands):
            bands[slot, index] = torch.tensor(_band(row, band), dtype=torch.int32)
        for index, each in enumerate(row.maps):
            maps[slot, index] = torch.tensor([each.period, each.cap, each.divisor])
            _fill_pairs(pairs[slot, index, :, : max(num_pairs, 1)], each)
        turns = torch.tensor(row.frequencies, dtype=torch.float64) / (2 * math.pi)
        frequencies[slot, 0, : len(turns)] = turns.float()
        frequencies[slot, 1, : len(turns)] = (turns - turns.float().double()).float()
        if row.bias is not None:
            biases[slot, 0], biases[slot, 1] = row.bias.a, row.bias.b
            slots[slot, 1] = int(row.bias.kind)
            if row.bias.table is not None:
                slots[slot, 2], slots[slot, 3] = sum(map(len, distances)), row.bias.table.shape[1]
                distances.append(row.bias.table.flatten())
    return RowTables(
        slots=slots.to(device),
        bands=bands.to(device),
        maps=maps.to(device),
        pairs=pairs.to(device),
        frequencies=frequencies.to(device),
        biases=biases.to(device),
        distances=torch.cat(distances).to(device),
        temperatures=temperatures.to(device),
        num_pairs=num_pairs,
        interleaved=interleaved,
        offset=offset,
        turns=bool(bands[:, :, 4:].any()),
        by_pair=any(each.is_by_pair for row in rows.values() for each in row.maps),
        has_bias=any(row.bias is not None for row in rows.values()),
    )


def power_of_two(number: int, least: int = 16) -> int:
    """The smallest power of two from ``number`` and ``least`` on: sizes of the kernel's tensors."""
    return max(least, 1 << max(number - 1, 0).bit_length())


def _band(row: Row, band: BandRow) -> tuple[int, ...]:
    turns = [bool(row.frequencies) and each != row.base for each in (band.query_map, band.key_map)]
    return band.chunk, band.low, band.high, band.first, *turns


def _fill_pairs(target: torch.Tensor, of: MapRow) -> None:
    """``target`` [2, pairs] gets the groups and shifts of a map, the same for each pair or one for each."""
    target[0], target[1] = torch.tensor(of.groups).float(), torch.tensor(of.shifts).float()
