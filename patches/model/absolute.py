"""Seam C: position embeddings that a model adds to its tokens, each token's by the recipe of its slot.

A recipe says at which real-valued positions the embedding is read. A learned table is interpolated linearly between
neighbouring rows; a sinusoid (arXiv:1706.03762, section 3.5) is evaluated there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from patches.batch.slots import SlotTable, decode
from patches.encoding.recipe import AbsoluteMap
from patches.encoding.rotary import upcast


class AbsoluteEmbedding(Protocol):
    """Position embeddings of one model; the seam replaces the forward of ``module``."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def native(self, position: torch.Tensor) -> torch.Tensor:
        """Positions int64 [...] -> [..., width], to the bit what the model itself adds."""
        ...

    def at(self, position: torch.Tensor) -> torch.Tensor:
        """Real-valued positions float64 [...] -> [..., width], float32 or float64."""
        ...

    def bounded(self) -> AbsoluteEmbedding:
        """The same, with an embedding at any position."""
        ...


@dataclass(frozen=True, eq=False)
class LearnedTable:
    """A table with position 0 in row ``offset``.

    Positions past its last row are an error. On a card it ends the process's context, and no ``ValueError`` comes.
    Such positions read the last row where the table ``is_bounded``.
    """

    module: nn.Embedding
    offset: int = 0
    is_bounded: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.module.weight.dtype

    def native(self, position: torch.Tensor) -> torch.Tensor:
        row = position + self.offset
        if self.is_bounded:
            row = row.clamp_max(self.module.num_embeddings - 1)
        try:
            return nn.Embedding.forward(self.module, row)
        except IndexError:
            rows = self.module.num_embeddings - self.offset
            raise ValueError(
                f"position_ids: this model's table has {rows} positions; the text reads past them"
            ) from None

    def at(self, position: torch.Tensor) -> torch.Tensor:
        last = self.module.num_embeddings - self.offset - 1
        low = position.floor().long()
        rows = upcast(self.native(low)), upcast(self.native((low + 1).clamp_max(last)))
        return torch.lerp(*rows, (position - low).to(rows[0].dtype)[..., None])

    def bounded(self) -> LearnedTable:
        return replace(self, is_bounded=True)


@dataclass(frozen=True, eq=False)
class Sinusoid:
    """sin and cos of (position + ``offset``) x frequency, which the model has as a table.

    ``interleaved``: sin and cos alternate and frequencies are 10000^(-2i/width), as in the paper. Otherwise all sines
    come first and the exponent is i / (width/2 - 1), as in tensor2tensor, fairseq and Marian.
    """

    module: nn.Module
    table: torch.Tensor
    offset: int = 0
    interleaved: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.table.dtype

    def native(self, position: torch.Tensor) -> torch.Tensor:
        # Past its table, the model would make a longer one by the same float32 operations.
        index, rows = position + self.offset, self.table.shape[0]
        computed = self._waves(index.float(), torch.float32).to(self.dtype)
        return torch.where((index < rows)[..., None], self.table[index.clamp_max(rows - 1)], computed)

    def at(self, position: torch.Tensor) -> torch.Tensor:
        return self._waves(position + self.offset, torch.float64)

    def bounded(self) -> Sinusoid:
        return self

    def _waves(self, position: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        pairs = self.table.shape[1] // 2
        i = torch.arange(pairs, device=position.device).to(dtype)
        step = math.log(10_000.0) / (pairs if self.interleaved else pairs - 1)
        angles = position[..., None] * torch.exp(i * -step)
        if self.interleaved:
            return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)
        return torch.cat((angles.sin(), angles.cos()), dim=-1)


def embeddings(
    embedding: AbsoluteEmbedding, position_ids: torch.Tensor, slots: SlotTable, used: Iterable[int] | None = None
) -> torch.Tensor:
    """Position embeddings [rows, tokens, width] of encoded ``position_ids`` [rows, tokens].

    Each of the ``used`` slots that moves positions has its own operations. A CUDA graph can have them: the host reads
    no tensor. None are the slots of these tokens, which it reads if some slot of the table moves positions. With
    ``used``, positions past a table read its last row: those of a request that was cancelled meanwhile have any slot.
    """
    if used is not None:
        embedding = embedding.bounded()
    position, slot = decode(position_ids)
    if used is None and slots.adds(None):
        used = slot.unique().tolist()
    moving = [(slot == number, absolute) for number, absolute in slots.adds(used)]
    plain = position
    for inside, _ in moving:  # their positions may lie past the end of a table
        plain = plain.masked_fill(inside, 0)
    output = embedding.native(plain)
    for inside, absolute in moving:
        own = mapped(embedding, absolute, position.masked_fill(~inside, 0).flatten())
        output = torch.where(inside[..., None], own.view_as(output), output)
    return output


def mapped(embedding: AbsoluteEmbedding, absolute: AbsoluteMap, position: torch.Tensor) -> torch.Tensor:
    """Weighted sum [n, width] of the embedding at the positions to which ``absolute`` maps ``position`` [n]."""
    weights, positions = absolute(position)
    return (weights[..., None] * embedding.at(positions)).sum(-2).to(embedding.dtype)
