"""Feeding a patched model by hand: encodings into slots, left padding, chunks through a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from patches import Patched, ResolvedRecipe, encode, parse
from patches.encoding.rotary import per_pair, rotary_table, rotate
from tests.methods import Fields


def slot_of(patch: Patched, fields: Fields, length: int) -> int:
    """Slot of a request that reserves ``length`` tokens."""
    return patch.slots.acquire(patch.resolve(parse(fields), length))


def written(states: torch.Tensor, resolved: ResolvedRecipe, first: int = 0) -> torch.Tensor:
    """``states`` [..., n, head_dim] of positions first, first + 1, ... as the rotary seam writes them."""
    if not resolved.rotates:
        return states
    position, layout = torch.arange(first, first + states.shape[-2]), resolved.interleaved
    base, turns = per_pair(resolved.recipe.base(position)), torch.tensor(resolved.turns)
    table = rotary_table(base, turns, resolved.attention_factor, interleaved=layout)
    return rotate(states, *table, interleaved=layout, offset=resolved.offset)


def left_padded(rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, padding mask and positions, each [rows, longest], of rows of token ids [length]."""
    tokens = pad_sequence(list(rows), batch_first=True, padding_side="left")
    lengths = torch.tensor([len(row) for row in rows])
    columns = torch.arange(tokens.shape[1])[None] - (tokens.shape[1] - lengths)[:, None]
    return tokens, (columns >= 0).long(), columns.clamp_min(0)


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens: torch.Tensor, slots: int | Sequence[int] = 0) -> torch.Tensor:
    """Logits [rows, tokens, vocabulary] of one full pass without padding; one slot, or one per row."""
    position_ids = encode(torch.arange(tokens.shape[1])[None], torch.as_tensor(slots).reshape(-1, 1))
    result: torch.Tensor = model(tokens, position_ids=position_ids, use_cache=False).logits
    return result


@torch.no_grad()
def chunked_logits(
    model: PreTrainedModel,
    tokens: torch.Tensor,
    mask: torch.Tensor,
    position_ids: torch.Tensor,
    *,
    cache: Any,
    chunks: Sequence[int],
) -> torch.Tensor:
    """Logits as of one pass over encoded ``position_ids``, fed through ``cache`` in chunks of these sizes."""
    assert sum(chunks) == tokens.shape[1]
    parts, start = [], 0
    for size in chunks:
        new = slice(start, start + size)
        start += size
        seen = mask[:, :start]
        output = model(
            tokens[:, new],
            attention_mask=seen,
            position_ids=position_ids[:, new],
            cache=cache,
            use_cache=True,
        )
        parts.append(output.logits)
    return torch.cat(parts, dim=1)


def relative(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected magnitude."""
    return float((result - expected).abs().max() / expected.abs().max())
