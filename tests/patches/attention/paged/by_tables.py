"""Paged attention in plain torch over the very tensors that the Triton kernel reads, work item by work item."""

from __future__ import annotations

from collections.abc import Callable

import torch

from patches.attention.layer import Layer
from patches.attention.paged.compilation import mask_row
from patches.attention.paged.rows import BiasKind
from patches.attention.paged.tables import MOST_BANDS, RowTables
from patches.attention.paged.triton.launch import Plan
from patches.encoding.positions import NO_LIMIT

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Largest score [n, heads], sum of weights [n, heads] and weighted values [n, heads, dim] of n items."""


def attend(
    query: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor, plan: Plan, layer: Layer
) -> torch.Tensor:
    """``launch.attend``, in float32."""
    out = torch.zeros(*query.shape[:2], value_pages.shape[-1])
    pages = key_pages.float(), value_pages.float()
    if len(plan.chunks):  # never captured
        tokens = [
            (index, column)
            for index, (_, _, _, queries, _, _) in enumerate(plan.sequences.tolist())
            for column in range(queries)
            if queries > 1
        ]
        items = torch.tensor([(index, column, 0, NO_LIMIT) for index, column in tokens], dtype=torch.int32)
        longest = int((plan.sequences[:, 1] + plan.sequences[:, 3]).max())
        top, total, values = _parts(query.float(), pages, plan, layer, items, longest)
        token = plan.sequences[items[:, 0].long(), 2] + items[:, 1]
        out[token.long()] = _finished(top, total, values, layer)
    if len(plan.singles):
        parts = _parts(query.float(), pages, plan, layer, plan.singles, 4 * plan.blocks.split)
        first = plan.edges[:-1].long()
        items = torch.arange(len(plan.singles))
        owner = torch.searchsorted(plan.edges[1:].contiguous(), items, right=True)  # padding: behind the last
        merged = _merged(parts, owner, len(first))
        sequence = plan.singles[first, 0].long()
        token = plan.sequences[sequence, 2].long()
        out.index_put_((token,), _finished(*merged, layer))
    return out.to(query.dtype)


def _merged(parts: Parts, owner: torch.Tensor, count: int) -> Parts:
    top, total, values = parts
    heads, dim = values.shape[1:]
    best = torch.full((count + 1, heads), float("-inf"))
    best = best.scatter_reduce(0, owner[:, None].expand(-1, heads), top, "amax")
    weight = (top - best[owner].clamp_min(-1e30)).exp()
    sums = torch.zeros(count + 1, heads).index_add(0, owner, total * weight)
    merged = torch.zeros(count + 1, heads, dim).index_add(0, owner, values * weight[..., None])
    return best[:count], sums[:count], merged[:count]


def _finished(top: torch.Tensor, total: torch.Tensor, values: torch.Tensor, layer: Layer) -> torch.Tensor:
    if layer.sinks is not None:
        new = torch.maximum(top, layer.sinks.float())
        shrink = (top - new).exp()
        total, values = total * shrink + (layer.sinks.float() - new).exp(), values * shrink[..., None]
    return values / total[..., None]


def _parts(
    query: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    plan: Plan,
    layer: Layer,
    items: torch.Tensor,
    span: int,
) -> Parts:
    """Each item is one query, and at most ``span`` keys from its first one on."""
    tables, page_size = plan.tables, plan.page_size
    valid, sequence = items[:, 0] >= 0, items[:, 0].clamp_min(0).long()
    slot, q_start, edge, _, first_pages, evicted = plan.sequences[sequence].long().unbind(1)
    q_idx, token = q_start + items[:, 1], edge + items[:, 1]
    kv_idx = items[:, 2, None] + torch.arange(span)
    page = kv_idx // page_size
    entry = page - torch.where(page >= first_pages[:, None], evicted[:, None], 0)
    inside = valid[:, None] & (kv_idx <= q_idx[:, None]) & (kv_idx < items[:, 3, None])
    table = plan.block_table[sequence[:, None], entry.clamp(0, plan.block_table.shape[1] - 1)]
    places = torch.where(inside, table, 0).long(), kv_idx % page_size
    group = plan.heads // plan.kv_heads
    key, value = (each[places].repeat_interleave(group, 2) for each in pages)  # [n, span, heads, dim]
    scores, covered = torch.zeros(len(items), span, plan.heads), torch.zeros(len(items), span, dtype=torch.bool)
    own = mask_row(layer.mask)(q_idx[:, None], kv_idx)
    of_query, of_key = ((position, _placed(position, slot, tables, 0)) for position in (q_idx[:, None], kv_idx))
    for band in range(min(MOST_BANDS, int(tables.slots[slot, 0].max()))):
        chunk, low, high, first, turns_query, turns_key = (
            each[:, None] for each in tables.bands[slot, band].long().unbind(1)
        )
        chunk = chunk.clamp_min(1)
        apart = q_idx[:, None] // chunk - kv_idx // chunk
        reached = inside & own & (apart >= low) & (apart < high) & (kv_idx < first)
        reached = reached & (band < tables.slots[slot, 0])[:, None]
        turned_query = _turned(query[token][:, None], of_query, turns_query, slot, tables, 1 + 2 * band)
        turned_key = _turned(key, of_key, turns_key, slot, tables, 2 + 2 * band)
        scores = torch.where(reached[..., None], (turned_query * turned_key).sum(-1), scores)
        covered = covered | reached
    factor = plan.factor[token] * layer.scaling
    if layer.temperature is not None:
        factor = factor * layer.temperature(q_idx)
    scores = scores * factor[:, None, None]
    if layer.softcap is not None:
        scores = (scores / layer.softcap).tanh() * layer.softcap
    scores = scores + _bias(tables, slot, q_idx[:, None], kv_idx)
    scores = scores.masked_fill(~covered[..., None], float("-inf"))
    top = scores.amax(1)
    weights = (scores - top.clamp_min(-1e30)[:, None]).exp()
    return top, weights.sum(1), (weights[..., None] * value).sum(1)


def _placed(position: torch.Tensor, slot: torch.Tensor, tables: RowTables, index: int) -> torch.Tensor:
    """float32 [n, m, pairs]: positions [n, m] under one map of each slot."""
    period, cap, divisor = (each[:, None, None] for each in tables.maps[slot, index].unbind(1))
    group, shift = (each[:, None] for each in tables.pairs[slot, index, :, : tables.layout.count].unbind(1))
    grouped = position[..., None] % period.long() // group.long()
    return torch.minimum(grouped + shift, cap) / divisor


def _turned(
    states: torch.Tensor,
    positions: tuple[torch.Tensor, torch.Tensor],
    turns: torch.Tensor,
    slot: torch.Tensor,
    tables: RowTables,
    index: int,
) -> torch.Tensor:
    """``states`` [n, m, heads, dim] at positions [n, m], turned from the base to a map where ``turns`` [n, 1].

    ``positions`` has them, and their places under the base.
    """
    position, base = positions
    layout = tables.layout
    if not layout.count:
        return states
    by = _placed(position, slot, tables, index) - base
    frequencies = tables.frequencies[slot, :, : layout.count].double().sum(1)
    angles = 2 * torch.pi * by.double() * frequencies[:, None] * (turns > 0)[..., None]
    cos, sin = angles.cos().float()[:, :, None], angles.sin().float()[:, :, None]
    step = 2 if layout.interleaved else 1
    first, length = layout.offset, layout.count * step
    one = slice(first, first + length, step)
    two = slice(first + 1, first + 1 + length, step) if layout.interleaved else slice(one.stop, one.stop + length)
    x, y = states[..., one], states[..., two]
    turned = states.clone()
    turned[..., one], turned[..., two] = x * cos - y * sin, y * cos + x * sin
    return turned


def _bias(tables: RowTables, slot: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
    """float32 [n, keys, heads]."""
    distance = (q_idx - kv_idx).clamp_min(0)[..., None]
    d, (a, b) = distance.float(), (each[:, None] for each in tables.biases[slot].unbind(1))
    kind, start, length = (each[:, None, None] for each in tables.slots[slot, 1:4].long().unbind(1))
    at = start + torch.arange(a.shape[-1]) * length + torch.minimum(distance, (length - 1).clamp_min(0))
    bias = torch.zeros(*kv_idx.shape, a.shape[-1])
    formulas: dict[BiasKind, Callable[[], torch.Tensor]] = {
        BiasKind.LINEAR: lambda: -a * d,
        BiasKind.BFLOAT16: lambda: (a.bfloat16() * kv_idx[..., None].bfloat16()).float() * b,
        BiasKind.LOG: lambda: -a * torch.log1p(b * d),
        BiasKind.POWER: lambda: -a * d**b,
        BiasKind.TABLE: lambda: tables.distances[at.clamp(0, len(tables.distances) - 1)],
    }
    for each in formulas.keys() & set(kind.flatten().tolist()):
        bias = torch.where(kind == int(each), formulas[each](), bias)
    return bias


def write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    places: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """``launch.write``."""
    key_pages.index_put_(places, key)
    value_pages.index_put_(places, value)
