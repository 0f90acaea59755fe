"""Rotary tables of decode steps, made for several steps at once.

Behind each token of a step comes that of the next position, unless requests come or go. A dozen small operations take
as long for eight steps as for one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

import torch

from patches.attention.decode.plan import STEPS

Table = tuple[torch.Tensor, ...] | torch.Tensor


class StepsAhead(threading.local):
    """The tables of each thread's next decode steps, on a CPU.

    A step's Python is in no cache of the processor, since the weights of the step before went through them. So a table
    that is known costs one lookup.
    """

    def __init__(self) -> None:
        self._tables: dict[Hashable, Table] = {}
        self._next: Hashable = None

    def table(self, encoded: torch.Tensor, kind: Hashable, make: Callable[[torch.Tensor], Table]) -> Table:
        """``make(encoded)`` of encoded positions [1, tokens].

        ``make`` gives a table [..., rows, tokens, dim] of positions [rows, tokens]. Those of one ``kind`` depend on
        positions alone.
        """
        kind = kind, encoded.dtype
        key = kind, encoded.numpy().tobytes()
        if key not in self._tables:
            self._make(encoded, kind, make, goes_on=key == self._next)
        return self._tables[key]

    def _make(
        self, encoded: torch.Tensor, kind: Hashable, make: Callable[[torch.Tensor], Table], *, goes_on: bool
    ) -> None:
        """Tables of several steps, or of one that does not go on. Behind a prompt's, no step is alike."""
        steps = encoded + torch.arange(STEPS if goes_on else 1, dtype=encoded.dtype)[:, None]
        keys = [(kind, step.tobytes()) for step in steps.numpy()]
        self._tables = dict(zip(keys, _by_step(make(steps)), strict=True))
        self._next = kind, (steps[-1] + 1).numpy().tobytes()


def _by_step(table: Table) -> list[Table]:
    if isinstance(table, torch.Tensor):
        return list(table.split(1, -3))
    return [tuple(parts) for parts in zip(*(part.split(1, -3) for part in table), strict=True)]
