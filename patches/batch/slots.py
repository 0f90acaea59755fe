"""The slot table: encodings in use, and how a token carries its slot inside ``position_ids``.

A token's position occupies the low 24 bits (exact in float32), its slot the 7 bits above. The whole stays a positive
int32.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch

from patches.encoding.bands import IDENTITY
from patches.encoding.positions import MapRow
from patches.encoding.recipe import AbsoluteMap, ResolvedRecipe

POSITION_BITS = 24
MAX_POSITION = (1 << POSITION_BITS) - 1
MAX_SLOTS = 128

Numbers = TypeVar("Numbers", torch.Tensor, np.ndarray)


class SlotsExhausted(RuntimeError):
    """Live requests use all slots: try again when one of them has finished."""


def encode(position_ids: Numbers, slot: Numbers | int) -> Numbers:
    """Put ``slot`` (0..127) above the positions (0..2^24 - 1); broadcasts, keeps the dtype."""
    if isinstance(slot, torch.Tensor):
        slot = slot.to(position_ids.dtype)
    return position_ids | (slot << POSITION_BITS)


def positions_of(position_ids: torch.Tensor) -> torch.Tensor:
    """The positions of encoded ``position_ids``, same shape and dtype."""
    return position_ids & MAX_POSITION


def decode(position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split encoded ``position_ids`` into (positions, slots), same shape and dtype."""
    return positions_of(position_ids), position_ids >> POSITION_BITS


class SlotTable:
    """Interned encodings of one model, as stacked tensors indexed by slot.

    A new encoding reaches the tensors with ``upload``, which the thread of the next forward calls. Their addresses
    stay. Slot 0 is always the model's own encoding, so plain ``position_ids`` keep their meaning. ``inv_freq`` is
    [128, rotary_dim / 2]. An encoding without rotation has zero frequencies and factor 1 there, which makes cos = 1
    and sin = 0. Queries and keys are written under the encoding's base map. Between two ``uploads``, numbers stay.
    """

    capacity = MAX_SLOTS - 1
    """Encodings that can be in use beside the model's own."""

    def __init__(
        self,
        native: ResolvedRecipe,
        rotary_dim: int,
        device: torch.device,
        base_of: Callable[[ResolvedRecipe], MapRow],
    ) -> None:
        """``base_of`` gives the numbers of an encoding's base map."""
        self._native, self._pairs_of_head, self._device = native, rotary_dim // 2, device
        self._lock, self._base_of = threading.Lock(), base_of
        self.inv_freq = torch.zeros(MAX_SLOTS, self._pairs_of_head, dtype=torch.float32, device=device)
        self.attention_factor = torch.ones(MAX_SLOTS, 1, dtype=torch.float32, device=device)
        self._maps = torch.ones(MAX_SLOTS, 3, dtype=torch.float32, device=device)
        self._pairs = torch.ones(MAX_SLOTS, 2, max(self._pairs_of_head, 1), dtype=torch.float32, device=device)
        self.uploads = 0
        self.clear()

    def clear(self) -> None:
        """Forget every encoding but the model's own; none may be in use. Seams and engines keep this very table."""
        self._slot_of: dict[ResolvedRecipe, int] = {self._native: 0}
        self._users = [0] * MAX_SLOTS
        self.recipes: list[ResolvedRecipe | None] = [None] * MAX_SLOTS
        self._new: set[int] = set()
        self._moves, self._adds = False, dict[int, AbsoluteMap]()
        self._write(0, self._native)

    def acquire(self, resolved: ResolvedRecipe) -> int:
        """Slot of ``resolved``, interned if new; pair every call with ``release``.

        Raises:
            SlotsExhausted: when 128 different encodings are in use.
        """
        with self._lock:
            slot = self._slot_of.get(resolved)
            if slot is None:
                slot = self._free_slot()
                self._write(slot, resolved)
                self._slot_of[resolved] = slot
            self._users[slot] += 1
            return slot

    @contextmanager
    def held(self, resolved: ResolvedRecipe) -> Iterator[int]:
        """Slot of ``resolved`` until the context ends.

        Raises:
            SlotsExhausted: when 128 different encodings are in use.
        """
        slot = self.acquire(resolved)
        try:
            yield slot
        finally:
            self.release(slot)

    def put(self, slot: int, resolved: ResolvedRecipe) -> None:
        """Write ``resolved`` into ``slot`` as another rank's table has it."""
        with self._lock:
            self._write(slot, resolved)

    def upload(self) -> None:
        """Write the encodings that are new since the last call into the tensors, in place, row by row."""
        if not self._new:
            return
        self.uploads += 1
        with self._lock:
            for slot in list(self._new):
                self._upload(slot, self[slot])
                self._new.remove(slot)

    def release(self, slot: int) -> None:
        """Give one use back; the encoding stays interned until its slot is needed."""
        with self._lock:
            if self._users[slot] == 0:
                raise ValueError(f"slot {slot} is not in use")
            self._users[slot] -= 1

    def __getitem__(self, slot: int) -> ResolvedRecipe:
        resolved = self.recipes[slot]
        if resolved is None:
            raise IndexError(f"slot {slot} holds no encoding")
        return resolved

    def at_write(self, position: torch.Tensor, slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(positions, frequencies, factors) under which keys of ``position`` and ``slot`` [...] are written.

        Positions are [..., 1], or [..., rotary_dim / 2] where an encoding in the table moves them; frequencies are
        [..., rotary_dim / 2] and factors [..., 1].
        """
        position = position[..., None]
        if self._moves:
            period, cap, divisor = self._maps[slot].split(1, -1)
            group, shift = self._pairs[slot].unbind(-2)
            grouped = position % period.to(position.dtype) // group.to(position.dtype)
            position = torch.minimum(grouped + shift, cap) / divisor
        return position, self.inv_freq[slot], self.attention_factor[slot]

    @property
    def moves(self) -> bool:
        """True if some encoding moves rotated positions: it decides a forward's operations."""
        return self._moves

    def adds(self, slots: Iterable[int] | None) -> tuple[tuple[int, AbsoluteMap], ...]:
        """Those of ``slots`` that move added positions, or of the table for None: they decide operations too."""
        adds = dict(self._adds)  # another thread may write a slot
        return tuple((slot, adds[slot]) for slot in sorted(adds if slots is None else adds.keys() & set(slots)))

    def in_use(self) -> int:
        """Number of slots whose encodings live requests use."""
        return sum(users > 0 for users in self._users)

    def _free_slot(self) -> int:
        for slot in range(1, MAX_SLOTS):
            if self.recipes[slot] is None:
                return slot
        for slot in range(1, MAX_SLOTS):
            if self._users[slot] == 0:
                del self._slot_of[self[slot]]
                return slot
        raise SlotsExhausted(f"{MAX_SLOTS} different encodings are in use")

    def _write(self, slot: int, resolved: ResolvedRecipe) -> None:
        self.recipes[slot] = resolved
        self._new.add(slot)
        self._adds.pop(slot, None)
        if resolved.recipe.absolute is not None:
            self._adds[slot] = resolved.recipe.absolute
        self._moves |= resolved.recipe.base != IDENTITY

    def _upload(self, slot: int, resolved: ResolvedRecipe) -> None:
        if not resolved.rotates:
            self.inv_freq[slot], self.attention_factor[slot] = 0.0, 1.0
            return
        self.inv_freq[slot] = torch.tensor(resolved.inv_freq, dtype=torch.float32)
        self.attention_factor[slot] = resolved.attention_factor
        base = self._base_of(resolved)
        self._maps[slot] = torch.tensor((base.period, base.cap, base.divisor), dtype=torch.float32)
        for row, numbers in zip(self._pairs[slot], (base.groups, base.shifts), strict=True):
            row.copy_(torch.tensor(numbers, dtype=torch.float32))
