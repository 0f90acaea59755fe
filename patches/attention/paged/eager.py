"""Paged attention over explicit scores, sequence by sequence: the specification of the kernels over the same rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from patches.attention.layer import Layer
from patches.attention.paged.compilation import DoesNotFit, mask_row
from patches.attention.paged.rows import Row
from patches.attention.paged.step import Step
from patches.encoding.positions import MapRow
from patches.encoding.rotary import rotate, upcast


def attend(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    step: Step,
    rows: Mapping[int, Row],
    layer: Layer,
) -> torch.Tensor:
    """Attention output [tokens, heads, value dim] in the dtype of ``query``, computed in float32 or float64.

    ``query`` [tokens, heads, head_dim] and ``key_pages`` [pages, size, kv_heads, head_dim] are rotated under the base
    map of their sequence's row. ``value_pages`` is [pages, size, kv_heads, value dim]. ``rows`` are by slot.

    Raises:
        DoesNotFit: for a layer that chooses keys.
    """
    if layer.bias is not None:
        raise DoesNotFit("layers that choose keys have a mask per pair, and no row expresses it")
    outputs = []
    edges = step.query_edges
    for index, (sequence, first, stop) in enumerate(zip(step.sequences, edges, edges[1:], strict=False)):
        q_idx = step.positions[first:stop]
        kv_idx = sequence.kv_idx(step.page_size).to(step.device)
        places = step.places(index, kv_idx)
        q, k, v = (
            upcast(states).transpose(0, 1) for states in (query[first:stop], key_pages[places], value_pages[places])
        )
        attended = _attend(q, k, v, q_idx, kv_idx, rows[sequence.slot], layer)
        outputs.append(attended.transpose(0, 1))
    return torch.cat(outputs).to(query.dtype)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    q_idx: torch.Tensor,
    kv_idx: torch.Tensor,
    row: Row,
    layer: Layer,
) -> torch.Tensor:
    """[heads, q, value dim] of ``query`` [heads, q, head_dim], ``key`` and ``value`` [kv_heads, k, ...]."""
    groups = len(query) // len(key)
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    pairs = q_idx[:, None], kv_idx[None]
    own = mask_row(layer.mask)(*pairs)
    scores, covered = torch.zeros_like(query @ key.mT), torch.zeros_like(own)
    for band in row.bands:
        inside = band(*pairs) & own
        band_scores = _turned(query, row, band.query_map, q_idx) @ _turned(key, row, band.key_map, kv_idx).mT
        scores, covered = torch.where(inside, band_scores, scores), covered | inside
    factor = layer.scaling * row.temperature(q_idx)
    if layer.temperature is not None:
        factor = factor * layer.temperature(q_idx)
    scores = scores * factor[:, None].to(scores.dtype)
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    if row.bias is not None:
        scores = scores + row.bias(*pairs)
    scores = scores.masked_fill(~covered, float("-inf"))
    if layer.sinks is not None:
        nothing = layer.sinks.to(scores.dtype)[:, None, None].expand(-1, len(q_idx), 1)
        scores = torch.cat((scores, nothing), dim=-1)
    return torch.softmax(scores, dim=-1)[..., : len(kv_idx)] @ value


def _turned(states: torch.Tensor, row: Row, to: MapRow, positions: torch.Tensor) -> torch.Tensor:
    """``states`` [heads, n, head_dim], written under the base map at ``positions``, under the map ``to``."""
    turn = row.turn(to, positions) if row.frequencies else None
    if turn is None:
        return states
    angles = turn * torch.tensor(row.frequencies, dtype=torch.float64, device=states.device)
    angles = angles.repeat_interleave(2, -1) if row.interleaved else torch.cat((angles, angles), -1)
    cos, sin = (table.to(states.dtype) for table in (angles.cos(), angles.sin()))
    return rotate(states, cos, sin, interleaved=row.interleaved, offset=row.offset)
