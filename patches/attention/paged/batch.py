"""A packed row of sequences over block tables: one paged attention for all of them in every layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal

import torch

from patches.attention.layer import Layer
from patches.attention.paged import eager, launch
from patches.attention.paged.compilation import compiled
from patches.attention.paged.rows import Row
from patches.attention.paged.step import PagedSequence, Step, step_of
from patches.attention.paged.tables import RowTables, power_of_two, stacked
from patches.batch.segments import Batch
from patches.encoding.recipe import ResolvedRecipe

PagedBackend = Literal["triton", "eager"]

SHORTEST = 1024
"""Least number of tokens for which a row is made: tables of biases have one number per distance."""


def runs_triton(device: torch.device) -> bool:
    """True if the Triton kernel runs on ``device``: CUDA, or the CPU under Triton's interpreter."""
    if find_spec("triton") is None:
        return False
    if device.type == "cuda":
        return True
    from patches.attention.paged import kernel

    return device.type == "cpu" and bool(kernel.INTERPRETED)


@dataclass
class PagedBatch(Batch):
    """``step`` has the sequences; there are no segments. Keys and queries are written under the base of their row."""

    step: Step = field(kw_only=True)
    backend: PagedBackend = field(kw_only=True)

    def attend(
        self,
        query: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        layer: Layer,
        role: str,
        recipe: Callable[[int], ResolvedRecipe],
    ) -> torch.Tensor:
        """Attention output [tokens, heads, value dim] in the dtype of ``query``.

        ``query`` is [tokens, heads, head_dim], and pages are [pages, size, kv_heads, dim]. ``recipe`` gives the
        encoding of a slot in layers with this ``role``.

        Raises:
            DoesNotFit: for a layer or an encoding without a row.
        """
        rows = self.shared(("rows", role), lambda: self._rows(recipe))
        if self.backend == "eager":
            return eager.attend(query, key_pages, value_pages, self.step, rows, layer)
        heads, kv_heads, dim = query.shape[1], key_pages.shape[2], query.shape[2]

        def make() -> launch.Plan:
            tables = _tables(tuple(rows.items()), heads, query.device)
            return launch.planned(self.step, tables, heads, kv_heads, launch.blocks_for(query.dtype, dim))

        plan = self.shared(("plan", role, heads, kv_heads, dim), make)
        return launch.attend(query, key_pages, value_pages, plan, layer)

    def _rows(self, recipe: Callable[[int], ResolvedRecipe]) -> Mapping[int, Row]:
        longest = power_of_two(max(sequence.q_stop for sequence in self.step.sequences), SHORTEST)
        return {slot: _row(recipe(slot), longest) for slot in sorted({s.slot for s in self.step.sequences})}


def paged_batch(
    sequences: Sequence[PagedSequence], page_size: int, device: torch.device, backend: PagedBackend
) -> PagedBatch:
    """The batch of ``sequences``, one after another in a packed row.

    Raises:
        ValueError: as ``step_of``.
    """
    return PagedBatch([], packed=True, step=step_of(sequences, page_size, device), backend=backend)


@lru_cache(maxsize=256)
def _row(resolved: ResolvedRecipe, length: int) -> Row:
    return compiled(resolved, length)


@lru_cache(maxsize=16)
def _tables(rows: tuple[tuple[int, Row], ...], heads: int, device: torch.device) -> RowTables:
    """Tables change only when encodings join or leave a batch."""
    return stacked(dict(rows), heads, device)
