"""Launches of the Triton kernel: work items of a step, block sizes, and the variant that its rows need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, partial

import torch

from patches.attention.layer import Layer
from patches.attention.paged.compilation import DoesNotFit, mask_row
from patches.attention.paged.decode import DecodeTable
from patches.attention.paged.rows import Variant
from patches.attention.paged.step import SPLIT, Step
from patches.attention.paged.tables import RowTables, power_of_two
from patches.attention.paged.triton.branches import side_by_side
from patches.attention.paged.triton.codes import Launch, codes_of, launches_of


@dataclass(frozen=True)
class Blocks:
    """Sizes of the kernel's blocks. ``rows`` are queries times heads of a key head, for sequences with several new
    tokens. ``keys`` counts the keys of a block. ``split`` counts the keys of one part of a single new token."""

    rows: int
    keys: int
    split: int = SPLIT

    @property
    def single_keys(self) -> int:
        """Keys of a block for a single new token: more would leave too few of its loads in flight."""
        return min(self.keys, 64)

    @property
    def warps(self) -> int:
        """One group of four warps multiplies 64 rows."""
        return max(4, self.rows // 16)

    def registers(self, launch: Launch, value_dim: int) -> int | None:
        """Most registers of a thread for a single new token, so that four programs fit; None for the compiler's choice.

        Only the code that turns keys spills much by it, and so do values of more than 128 numbers.
        """
        return None if launch.variant == Variant.PLAIN or launch.turns_keys or value_dim > 128 else 128

    def keys_of(self, variant: Variant) -> int:
        """Biases of any form need registers; a linear one is a product."""
        is_small = Variant.BIASED in variant and Variant.LINEAR not in variant
        return min(self.keys, 64) if is_small else self.keys


SHARED_BYTES = 200 << 10
"""Shared memory of a block from which on the largest sizes fit: that of an H100."""


def blocks_for(dtype: torch.dtype, head_dim: int, device: torch.device) -> Blocks:
    """Sizes that were fastest on an H200 for heads of 128. Others spill little, by compilation for sm_80 and sm_90, and
    have room in a block's shared memory."""
    if dtype == torch.float32:
        return Blocks(rows=32, keys=32) if head_dim <= 256 else Blocks(rows=16, keys=16)
    if head_dim > 256:
        return Blocks(rows=32, keys=32)
    if head_dim > 128:
        return Blocks(rows=64, keys=32)
    return Blocks(rows=128, keys=128) if _shared_bytes(device) >= SHARED_BYTES else Blocks(rows=64, keys=64)


@cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory that one block may have; on a CPU, any."""
    if device.type != "cuda":
        return SHARED_BYTES
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Plan:
    """The work of one step, shared by all layers of a role. ``Work`` explains the tensors of items.

    ``factor`` float32 [tokens] is the temperature of each token.
    """

    sequences: torch.Tensor
    block_table: torch.Tensor
    factor: torch.Tensor
    chunks: torch.Tensor
    singles: torch.Tensor
    edges: torch.Tensor
    positions: torch.Tensor
    page_size: int
    blocks: Blocks
    tables: RowTables
    variants: tuple[Variant, ...]
    heads: int
    kv_heads: int
    _scaled: dict[float, torch.Tensor] = field(default_factory=dict)
    _codes: dict[bool, torch.Tensor] = field(default_factory=dict)

    def scaled(self, scaling: float) -> torch.Tensor:
        """``factor`` times the scaling of a layer, computed once for all layers that have it."""
        if scaling not in self._scaled:
            self._scaled[scaling] = self.factor * scaling
        return self._scaled[scaling]

    def codes(self, *, split: bool) -> torch.Tensor:
        """``codes_of`` the ``singles`` or the ``chunks``, computed once for all layers."""
        if split not in self._codes:
            items = self.singles if split else self.chunks
            choose = split and any(Variant.KEYS in variant for variant in self.variants)
            self._codes[split] = codes_of(items, self.sequences, self.tables, by_keys=choose)
        return self._codes[split]

    def parts(self, value_dim: int) -> tuple[torch.Tensor, ...]:
        """Buffers for values, largest scores and sums of ``singles``, by key head and by head that shares it."""
        shape = len(self.singles), self.kv_heads, self.heads // self.kv_heads
        sizes = (*shape, value_dim), shape, shape
        return tuple(torch.empty(size, dtype=torch.float32, device=self.factor.device) for size in sizes)

    @property
    def group_width(self) -> int:
        return power_of_two(self.heads // self.kv_heads, least=1)


def planned(step: Step | DecodeTable, tables: RowTables, heads: int, kv_heads: int, blocks: Blocks) -> Plan:
    """The plan of ``step`` for layers with ``heads`` query heads and ``kv_heads`` key heads."""
    group_width = power_of_two(heads // kv_heads, least=1)
    work = step.work(max(1, blocks.rows // group_width), blocks.split)
    return Plan(
        work.sequences,
        step.block_table,
        tables.temperature(step.slots, step.positions).float(),
        work.chunks,
        work.singles,
        work.edges,
        step.positions,
        step.page_size,
        blocks,
        tables,
        tables.variants(step.longest),
        heads,
        kv_heads,
    )


def attend(
    query: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor, plan: Plan, layer: Layer
) -> torch.Tensor:
    """``patches.attention.paged.eager.attend`` on the Triton kernel, for float32, float16 or bfloat16.

    Raises:
        DoesNotFit: for a layer that chooses keys, and for states in float64.
        ModuleNotFoundError: without Triton.
    """
    if layer.bias is not None:
        raise DoesNotFit("layers that choose keys have a mask per pair, and no row expresses it")
    if query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise DoesNotFit(f"the kernel computes float32, float16 and bfloat16, and not {query.dtype}")
    from patches.attention.paged.triton import kernel

    out = query.new_empty(*query.shape[:2], value_pages.shape[-1])
    factor = plan.scaled(layer.scaling)
    if layer.temperature is not None:
        factor = factor * layer.temperature(plan.positions)
    own = mask_row(layer.mask)
    sinks = factor if layer.sinks is None else layer.sinks.contiguous()
    value_dim, tables = value_pages.shape[-1], plan.tables
    for items, rows, parts, split in _launches(plan, value_dim):
        given = (
            *(query, key_pages, value_pages, out, *parts, factor, sinks),
            *(items, plan.codes(split=split), plan.sequences, plan.block_table),
            *(tables.slots, tables.bands, tables.maps, tables.pairs),
            *(tables.frequencies, tables.biases, tables.distances),
            *(own.chunk, own.high, layer.softcap or 1.0, plan.block_table.shape[1]),
            *(*query.stride()[:2], *key_pages.stride()[:3], *value_pages.stride()[:3], *out.stride()[:2]),
        )
        constants = _constants(plan, layer, query, value_pages) | {"BLOCK_M": rows}
        attention = kernel.attention[(len(items), plan.kv_heads)]
        launches = [
            partial(attention, *given, **constants, **variant_constants(plan.blocks, one, value_dim, split=split))
            for one in launches_of(plan.variants, split=split)
        ]
        side_by_side(launches, query.device)
        if split:
            kernel.merge[(len(plan.edges) - 1, plan.heads)](
                *(out, *parts, sinks, items, plan.edges, plan.sequences, *out.stride()[:2]),
                VALUE_DIM=value_dim,
                VALUE_WIDTH=power_of_two(value_dim),
                KV_HEADS=plan.kv_heads,
                GROUP=plan.heads // plan.kv_heads,
                HAS_SINKS=layer.sinks is not None,
                PARTS=16,
            )
    return out


def write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    places: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Put new states [tokens, kv_heads, dim] into pages [pages, size, kv_heads, dim], in one launch.

    ``places`` are the page and the place in it of each token, int64 [tokens].
    """
    from patches.attention.paged.triton import kernel

    kernel.write[(key.shape[0], key.shape[1])](
        *(key, value, key_pages, value_pages, *places),
        *(*key.stride()[:2], *value.stride()[:2], *key_pages.stride()[:3], *value_pages.stride()[:3]),
        HEAD_DIM=key.shape[-1],
        HEAD_WIDTH=power_of_two(key.shape[-1]),
        VALUE_DIM=value.shape[-1],
        VALUE_WIDTH=power_of_two(value.shape[-1]),
        num_warps=1,
    )


def _launches(plan: Plan, value_dim: int) -> Iterator[tuple[torch.Tensor, int, tuple[torch.Tensor, ...], bool]]:
    """(items, rows of a block, buffers of parts, whether items are parts) of each launch that the step needs."""
    if len(plan.chunks):
        yield plan.chunks, max(16, plan.group_width, plan.blocks.rows), (plan.factor,) * 3, False
    if len(plan.singles):
        yield plan.singles, max(16, plan.group_width), plan.parts(value_dim), True


def variant_constants(blocks: Blocks, launch: Launch, value_dim: int, *, split: bool) -> dict[str, object]:
    """Numbers by which the code of a launch differs from that of another one in the same layer."""
    variant = launch.variant
    return {
        "BIAS": Variant.BIASED in variant,
        "LINEAR": Variant.LINEAR in variant,
        "TURNS": Variant.TURNED in variant,
        "BY_PAIR": Variant.BY_PAIR in variant,
        "CODE": launch.code,
        "TURNS_KEYS": launch.turns_keys,
        "SPLIT": split,
        "BLOCK_N": blocks.single_keys if split else blocks.keys_of(variant),
        "num_warps": 4 if split else blocks.warps,
        "maxnreg": blocks.registers(launch, value_dim) if split else None,
        "num_stages": 2,
    }


def _constants(plan: Plan, layer: Layer, query: torch.Tensor, value_pages: torch.Tensor) -> dict[str, object]:
    """Numbers that all launches of a layer are compiled for."""
    from patches.attention.paged.triton import kernel

    tables, head_dim, value_dim = plan.tables, query.shape[-1], value_pages.shape[-1]
    layout = tables.layout
    return {
        "NUM_PAIRS": layout.count,
        "WIDTH": tables.frequencies.shape[-1],
        "OFFSET": layout.offset,
        "INTERLEAVED": layout.interleaved,
        "HEAD_DIM": head_dim,
        "REST_WIDTH": power_of_two(head_dim - 2 * layout.count),
        "VALUE_DIM": value_dim,
        "VALUE_WIDTH": power_of_two(value_dim),
        "KV_HEADS": plan.kv_heads,
        "GROUP": plan.heads // plan.kv_heads,
        "GROUP_WIDTH": plan.group_width,
        "MOST_BANDS": tables.bands.shape[1],
        "SOFTCAP": layer.softcap is not None,
        "HAS_SINKS": layer.sinks is not None,
        "PAGE": plan.page_size,
        "FAST": not kernel.INTERPRETED,
        "UPCAST": kernel.INTERPRETED,
    }
