"""The Triton kernel over one sequence in an ordinary cache: its keys are one page after another already."""

from __future__ import annotations

from functools import lru_cache

import torch

from patches.attention.layer import Layer
from patches.attention.paged.batch import ModelRows, Role
from patches.attention.paged.compilation import DoesNotFit, compiled, mask_row
from patches.attention.paged.step import PagedSequence, Step, longest, step_of
from patches.attention.paged.tables import MOST_BANDS
from patches.attention.paged.triton import launch
from patches.batch.segments import Batch, Segment
from patches.encoding.masks import LayerMask
from patches.encoding.recipe import ResolvedRecipe

PAGE = 32
"""Keys of a page. There are no real pages, and the kernel is compiled for this size anyway."""

LEAST_KEYS = 512
"""With fewer keys, other calls take as long. The check before serving has fewer, and stays another witness."""


def is_faster(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, resolved: ResolvedRecipe, layer: Layer
) -> bool:
    """True if the kernel computes this attention, and torch has no single kernel that does.

    Tensors are as in ``attend``. The caller knows that Triton runs on their device.
    """
    if query.dtype not in (torch.bfloat16, torch.float16) or query.shape[0] > 1 or key.shape[2] < LEAST_KEYS:
        return False
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return False
    if not key.stride(3) == value.stride(3) == query.stride(3) == 1:
        return False
    is_torchs = resolved.is_plain and layer.is_ordinary and layer.mask.is_causal_below(key.shape[2])
    return not is_torchs and _is_by_pairs(layer) and _has_row(resolved) and _has_mask(layer.mask)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segment: Segment,
    batch: Batch,
    layer: Layer,
    role: Role,
    rows: ModelRows,
) -> torch.Tensor:
    """Output [1, heads, q, value dim] of ``query`` [1, heads, q, head_dim] at the positions of ``segment``.

    ``key`` [1, kv_heads, k, head_dim] and ``value`` have the positions 0 .. k - 1, of which the last is that of the
    last query.
    """
    heads, kv_heads, dim, device = query.shape[1], key.shape[1], query.shape[3], query.device
    # All slots of the batch at once: tables of biases make room by forgetting those of other slots.
    tables = batch.shared(
        ("rows in place", role, heads), lambda: rows.tables(role, heads, _longest(batch, role, rows), device)
    )

    def make() -> launch.Plan:
        blocks = launch.blocks_for(query.dtype, dim, device)
        return launch.planned(_step(segment, batch, device), tables, heads, kv_heads, blocks)

    plan = batch.shared(("in place", role, heads, kv_heads, dim, segment.slot, segment.q_start, segment.q_stop), make)
    attended = launch.attend(query[0].transpose(0, 1), _pages(key), _pages(value), plan, layer)
    return attended.transpose(0, 1)[None]


def _longest(batch: Batch, role: Role, rows: ModelRows) -> dict[int, int]:
    """Tokens of the longest sequence of every slot that has a row."""
    fitting = (segment for segment in batch.segments if _has_row(rows.recipe(role, segment.slot)))
    return longest((segment.slot, segment.q_stop) for segment in fitting)


def _step(segment: Segment, batch: Batch, device: torch.device) -> Step:
    """One sequence, whose pages are numbered in order."""
    slot, q_start, q_stop = segment.slot, segment.q_start, segment.q_stop

    def make() -> Step:
        sequence = PagedSequence(slot, q_start, q_stop - q_start, tuple(range(-(-q_stop // PAGE))))
        return step_of([sequence], PAGE, device)

    return batch.shared(("step", slot, q_start, q_stop), make)


def _pages(states: torch.Tensor) -> torch.Tensor:
    """[1, page size, kv_heads, dim] of [1, kv_heads, k, dim]: the first page, from whose strides others follow."""
    _, kv_heads, keys, dim = states.shape
    _, of_head, of_token, _ = states.stride()
    return states.as_strided((1, min(keys, PAGE), kv_heads, dim), (PAGE * of_token, of_token, of_head, 1))


def _is_by_pairs(layer: Layer) -> bool:
    """True if the layer adds nothing to the scores of single pairs, and sinks are those of heads."""
    own = layer.bias is None and layer.relative_logits is None
    return own and (layer.sinks is None or layer.sinks.ndim == 1)


@lru_cache(256)
def _has_row(resolved: ResolvedRecipe) -> bool:
    try:
        return len(compiled(resolved, 1).bands) <= MOST_BANDS
    except DoesNotFit:
        return False


def _has_mask(mask: LayerMask) -> bool:
    try:
        mask_row(mask)
    except DoesNotFit:
        return False
    return True
