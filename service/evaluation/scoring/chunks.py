"""Tokens per forward of a text that is read in chunks.

On a CPU a new request waits for the running chunk, so a chunk behind a long context is shorter. Its length, and so the
rounding of its numbers, depends on the model and the context alone. The load never changes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from patches import Patched

CHUNK, CHUNK_OF_ACCELERATORS = 512, 2048
"""Most tokens of a chunk where no setting says otherwise. Shorter ones leave a card waiting for Python."""

LOGITS_BYTES = 64 << 20
"""Most bytes of one chunk's float32 logits on a CPU, and of a part of them elsewhere."""

LOGITS_BYTES_OF_ACCELERATORS = 512 << 20
"""Most bytes of one chunk's logits in the dtype of the model: with a large vocabulary, chunks get shorter."""

FULL_CHUNK_CONTEXT = 1024
"""Tokens before a chunk up to which it has its full length."""

SHORTEST_CHUNK = 32
"""Tokens of a chunk behind the longest contexts: with fewer, attention reads every key more often for each token."""

PAIR_COST = 2
"""Time of an operation of attention, in operations of linear layers."""


def most_tokens(wanted: int | None, device: torch.device) -> int:
    """The setting of a chunk's length; None is that of the device."""
    return wanted or (CHUNK if device.type == "cpu" else CHUNK_OF_ACCELERATORS)


def chunk_length(wanted: int | None, patch: Patched) -> int:
    """Tokens per chunk, at most ``wanted``; None is as many as suit the device."""
    model, row = patch.model, patch.num_logits
    on_cpu = model.device.type == "cpu"
    fitting = LOGITS_BYTES // (4 * row) if on_cpu else LOGITS_BYTES_OF_ACCELERATORS // (model.dtype.itemsize * row)
    return max(16, min(most_tokens(wanted, model.device), fitting))


def in_parts(logits: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Rows of ``logits`` [n, vocabulary], and them in float32: whole, copies in float32 would take gigabytes."""
    rows = max(1, LOGITS_BYTES // (4 * logits.shape[-1]))
    for start in range(0, len(logits), rows):
        part = slice(start, min(start + rows, len(logits)))
        yield part, logits[part].float()


def bounded(patch: Patched, chunk: int, context: int) -> int:
    """Tokens of a chunk after ``context`` others, on the CPU ``shortened``.

    An accelerator takes a full chunk at any context in milliseconds, and small ones would starve it. A model that drops
    its state at a second chunk takes single tokens. Without a cache, every chunk reads the whole sequence again, and
    full ones are the fewest.
    """
    if not patch.returns_cache:
        return chunk
    if context and not patch.continues:
        return 1
    return chunk if patch.model.device.type != "cpu" else shortened(patch, chunk, context)


def shortened(patch: Patched, chunk: int, context: int) -> int:
    """As many tokens as take the time of ``chunk`` after ``FULL_CHUNK_CONTEXT``, and at least ``SHORTEST_CHUNK``."""
    linear, key = _operations(patch)
    taken = linear + key * (FULL_CHUNK_CONTEXT + chunk)
    return max(min(SHORTEST_CHUNK, chunk), min(chunk, chunk * taken // (linear + key * (context + chunk))))


def inner_size(config: Any) -> int:
    """Of the widest feed-forward layer; four times the hidden size, as usual, where the configuration has none."""
    size = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return int(max(size) if isinstance(size, list | tuple) else size)


def _operations(patch: Patched) -> tuple[int, int]:
    """Operations per token and layer: of linear layers, and of attention for each key, by its cost."""
    config, geometry = patch.model.config.get_text_config(), patch.geometry
    width = geometry.num_attention_heads * geometry.head_dim
    linear = 2 * config.hidden_size * (4 * width + 3 * inner_size(config))
    return linear, PAIR_COST * 4 * width
