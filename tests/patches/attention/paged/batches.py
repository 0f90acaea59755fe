"""Ragged batches over a paged cache, and the output that the specification gives for each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from patches import ResolvedRecipe, RopeGeometry, parse, resolve
from patches.attention import reference
from patches.attention.layer import Layer
from patches.attention.paged.compilation import compiled
from patches.attention.paged.decode import DecodeStep, DecodeSteps
from patches.attention.paged.rows import Row
from patches.attention.paged.step import PagedSequence, Step, step_of
from patches.attention.paged.tables import Pairs, RowTables
from patches.attention.paged.triton.launch import Blocks
from patches.encoding.masks import ChunkRange, DistanceRange
from patches.encoding.temperature import FloorLogTemperature
from tests.methods import Fields, one_per_shape, rows
from tests.patches.forward import written

TRAINED, LENGTH = 32, 256
CPU = torch.device("cpu")

WINDOWED: list[Fields] = [
    {"method": "streaming", "sink_tokens": 5, "window": 17},
    {"method": "streaming", "sink_tokens": 0, "window": 17},
    {"method": "lm_infinite", "n_global": 3, "n_local": 9},
]
"""Encodings whose pages between the first keys and the window are evicted."""


@dataclass(frozen=True)
class Shape:
    """One model. ``offset`` dimensions before the rotated ones pass through."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    value_dim: int = 16
    rotary_dim: int = 8
    offset: int = 0
    interleaved: bool = False
    reverses: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def geometry(self) -> RopeGeometry:
        return RopeGeometry(
            self.head_dim,
            self.rotary_dim,
            1e4,
            TRAINED,
            TRAINED,
            self.heads,
            self.interleaved,
            rotary_offset=self.offset,
            reverses=self.reverses,
        )

    def recipes(self) -> list[ResolvedRecipe]:
        """One of every shape of recipe that the registry builds for this model."""
        requests: list[Fields] = [
            request
            for row in rows(self.rotary_dim // 2, TRAINED, self.heads)
            for request in row.requests
            if not row.whole_head
        ]
        return [
            resolve(parse(fields), self.geometry, LENGTH) for fields in one_per_shape(requests, self.geometry, LENGTH)
        ]


SMALL = Blocks(rows=32, keys=16, split=32)
"""Small enough for several blocks and parts in a short sequence."""

SHAPES = {
    "plain": Shape(),
    "three_heads_share_a_key": Shape(heads=6),
    "interleaved": Shape(rotary_dim=16, interleaved=True),
    "latent": Shape(kv_heads=4, head_dim=24, value_dim=12, rotary_dim=8, offset=16, interleaved=True),
    "reversed": Shape(reverses=True),
}
SINKS = torch.linspace(-1.0, 2.0, 4)
LAYERS = {
    "window": Layer(0.3, DistanceRange(0, 13)),
    "chunk": Layer(0.3, ChunkRange(16, 0, 1)),
    "all": Layer(0.3, DistanceRange(0, 21), 3.0, SINKS, temperature=FloorLogTemperature(0.5, 8, 1)),
}
"""Layers with a mask, and one that changes its scores too."""


@dataclass
class PagedBatch:
    """A packed row of sequences, each with random states."""

    shape: Shape
    layer: Layer
    page_size: int
    generator: torch.Generator
    recipes: list[ResolvedRecipe] = field(default_factory=list)
    sequences: list[PagedSequence] = field(default_factory=list)
    queries: list[torch.Tensor] = field(default_factory=list)
    expected: list[torch.Tensor] = field(default_factory=list)
    cached: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def add(self, resolved: ResolvedRecipe, length: int, new: int, reached: tuple[int, int] | None = None) -> None:
        """A sequence of ``length`` tokens, ``new`` of them in this step.

        With ``reached`` (first, last), pages between the first and the last tokens of these numbers are evicted.
        """
        shape, dtype = self.shape, self.shape.dtype
        sizes = (shape.heads, new, shape.head_dim), (shape.kv_heads, length, shape.head_dim)
        query, key, value = (
            torch.randn(1, *size, generator=self.generator).to(dtype)
            for size in (*sizes, (shape.kv_heads, length, shape.value_dim))
        )
        written_query, written_key = written(query, resolved, length - new), written(key, resolved)
        expected = reference.attend(written_query, written_key, value, resolved, self.layer, q_start=length - new)
        count = -(-length // self.page_size)
        first_pages, evicted = 0, 0
        if reached is not None:
            first_pages = -(-reached[0] // self.page_size)
            evicted = max(0, max(0, length - new + 1 - reached[1]) // self.page_size - first_pages)
        start = sum(len(sequence.pages) for sequence in self.sequences)
        pages = tuple(range(start, start + count - evicted))
        slot = len(self.recipes)
        self.recipes.append(resolved)
        self.sequences.append(PagedSequence(slot, length - new, new, pages, first_pages, evicted))
        self.queries.append(written_query[0].transpose(0, 1))
        self.cached.append((written_key[0].transpose(0, 1), value[0].transpose(0, 1)))
        self.expected.append(expected[0].transpose(0, 1))

    def rows(self) -> dict[int, Row]:
        return {slot: compiled(resolved, LENGTH) for slot, resolved in enumerate(self.recipes)}

    def tables(self, device: torch.device = CPU) -> RowTables:
        shape = self.shape
        found = RowTables(shape.heads, Pairs(shape.rotary_dim // 2, shape.interleaved, shape.offset), device)
        found.write(self.rows())
        return found

    def build(self, device: torch.device = CPU) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Step]:
        """Query, key pages, value pages and step. Pages are in random order, and empty places are large numbers."""
        count = sum(len(sequence.pages) for sequence in self.sequences)
        order = torch.randperm(count + 3, generator=self.generator).tolist()
        sequences = [
            PagedSequence(**(vars(s) | {"pages": tuple(order[page] for page in s.pages)})) for s in self.sequences
        ]
        step = step_of(sequences, self.page_size, device)
        sizes = (count + 3, self.page_size, self.shape.kv_heads)
        pages = [
            torch.full((*sizes, dim), 1e3, dtype=self.shape.dtype, device=device)
            for dim in (self.shape.head_dim, self.shape.value_dim)
        ]
        for index, (sequence, states) in enumerate(zip(sequences, self.cached, strict=True)):
            past = sequence.kv_idx(self.page_size)
            past = past[past < sequence.q_start]
            for target, each in zip(pages, states, strict=True):
                target[step.places(index, past.to(device))] = each[past].to(device)
        for index, target in enumerate(pages):
            new = [states[index][s.q_start :] for s, states in zip(sequences, self.cached, strict=True)]
            target.index_put_(step.new_places, torch.cat(new).to(device))
        return torch.cat(self.queries).to(device), pages[0], pages[1], step


def ragged(shape: Shape, layer: Layer, page_size: int = 8, seed: int = 0, *, decode: bool | None = None) -> PagedBatch:
    """Every shape of recipe once, over random lengths; ``decode`` None mixes single tokens and chunks."""
    generator = torch.Generator().manual_seed(seed)
    batch = PagedBatch(shape, layer, page_size, generator)
    for index, resolved in enumerate(shape.recipes()):
        length, chunk = (int(torch.randint(low, high, (), generator=generator)) for low, high in ((1, 100), (2, 40)))
        single = index % 2 == 0 if decode is None else decode
        batch.add(resolved, length, 1 if single else min(length, chunk))
    return batch


def filled(steps: DecodeSteps, sequences: Sequence[PagedSequence], tokens: Sequence[int]) -> DecodeStep:
    """The step of ``sequences`` in one group of layers, with their new ``tokens``."""
    rows = np.array([(s.slot, s.q_start, s.first_pages, s.evicted_pages) for s in sequences], np.int64)
    return steps.of(rows, [{row: s.pages for row, s in enumerate(sequences)}], tokens)
