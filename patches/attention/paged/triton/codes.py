"""The launches of a layer, and the one that computes each work item. Code that turns keys needs twice the registers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from patches.attention.paged.rows import Variant
from patches.attention.paged.tables import RowTables

NOBODY = -1
"""Code of items of padding."""

TURNING = 1 << 5
"""Added to the code of a part whose keys turn; above all variants."""


class Launch(NamedTuple):
    """Rows of ``variant``, by code that turns keys or not. With ``chooses``, two launches divide their parts."""

    variant: Variant
    turns_keys: bool
    chooses: bool = False

    @property
    def code(self) -> int:
        return int(self.variant) + TURNING * (self.chooses and self.turns_keys)


def launches_of(variants: Iterable[Variant], *, split: bool) -> Iterator[Launch]:
    """The launches for rows of ``variants``: of parts of single tokens with ``split``, else of chunks of tokens."""
    for variant in variants:
        if Variant.KEYS not in variant:
            yield Launch(variant, turns_keys=False)
        elif split:
            yield Launch(variant, turns_keys=False, chooses=True)
            yield Launch(variant, turns_keys=True, chooses=True)
        else:
            yield Launch(variant, turns_keys=True)


def codes_of(items: torch.Tensor, sequences: torch.Tensor, tables: RowTables, *, by_keys: bool) -> torch.Tensor:
    """int32 [items]: the code of the launch for each of ``items`` and ``sequences``, as in ``Work``.

    ``by_keys``, items are parts, and some row turns keys. Codes are computed where the tables are, so a captured step
    may have rows of other slots in each replay.
    """
    sequence = sequences[items[:, 0].clamp_min(0)]
    slot = sequence[:, 0]
    codes = tables.slots[slot, 4]
    if by_keys:
        codes = codes + TURNING * _some_turn(tables, slot, sequence[:, 1], items[:, 2], items[:, 3]).int()
    return codes.where(items[:, 0] >= 0, NOBODY)


def _some_turn(
    tables: RowTables, slot: torch.Tensor, q_idx: torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> torch.Tensor:
    """Boolean [n]: whether a band of ``slot`` turns keys of low .. high - 1 that a query at ``q_idx`` reaches."""
    chunk, nearest, farthest, first, _, turns_keys = tables.bands[slot].unbind(-1)
    chunk, q_idx = chunk.clamp_min(1), q_idx[:, None]
    start = ((q_idx // chunk - farthest + 1).clamp_min(0) * chunk).maximum(low[:, None])
    stop = ((q_idx // chunk - nearest + 1).clamp_min(0) * chunk).minimum(q_idx + 1).minimum(first)
    number = torch.arange(chunk.shape[1], device=slot.device)
    is_band = number < tables.slots[slot, 0, None]
    return ((turns_keys > 0) & is_band & (start < stop.minimum(high[:, None]))).any(-1)
