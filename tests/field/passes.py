"""The same tokens through a model in three ways: a pass, a cache, a padded batch. The model is plain or patched."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from patches import encode
from tests.patches.forward import left_padded

NEW = 8
"""Last tokens of a row, decoded one at a time from a cache."""

Logits = list[torch.Tensor]
"""[tokens, vocabulary] of each row."""


@torch.no_grad()
def passed(model: PreTrainedModel, rows: Sequence[torch.Tensor], slots: Sequence[int] | None = None) -> Logits:
    """Every row in one pass without a cache. ``slots`` choose encodings of a patched model."""
    return [
        model(input_ids=row[None], **_positions(model, encoded[None]), use_cache=False).logits[0]
        for row, encoded in zip(rows, _encoded(rows, slots), strict=True)
    ]


@torch.no_grad()
def decoded(model: PreTrainedModel, rows: Sequence[torch.Tensor], slots: Sequence[int] | None = None) -> Logits | None:
    """Every row from the model's own cache: all but ``NEW`` tokens at once, the others one by one.

    None for a model that returns no cache (RecurrentGemma).
    """
    found = []
    for row, encoded in zip(rows, _encoded(rows, slots), strict=True):
        cache, parts = None, []
        for new in (slice(0, len(row) - NEW), *[slice(at, at + 1) for at in range(len(row) - NEW, len(row))]):
            positions = _positions(model, encoded[None, new])
            output = model(input_ids=row[None, new], cache=cache, use_cache=True, **positions)
            cache = getattr(output, "cache", None)
            if cache is None:
                return None
            parts.append(output.logits[0])
        found.append(torch.cat(parts))
    return found


@torch.no_grad()
def padded(model: PreTrainedModel, rows: Sequence[torch.Tensor]) -> Logits:
    """All rows in one left-padded batch, without the padding."""
    ids, mask, position_ids = left_padded(rows)
    logits = model(input_ids=ids, attention_mask=mask, **_positions(model, position_ids), use_cache=False).logits
    return [logits[number, mask[number].bool()] for number in range(len(rows))]


def _encoded(rows: Sequence[torch.Tensor], slots: Sequence[int] | None) -> list[torch.Tensor]:
    return [encode(torch.arange(len(row)), slot) for row, slot in zip(rows, slots or [0] * len(rows), strict=True)]


def _positions(model: PreTrainedModel, encoded: torch.Tensor) -> dict[str, torch.Tensor]:
    """Positions, where the model or its patch takes them, as ``generate`` passes them."""
    parameters = inspect.signature(model.forward).parameters
    return {"position_ids": encoded} if {"position_ids", "position_encoding"} & parameters.keys() else {}
