"""What a pass holds in memory, computed before it begins."""

from __future__ import annotations

from patches import Patched
from service.evaluation.scoring import FULL_CHUNK_CONTEXT, chunk_length, vocab_size_of
from service.models.loading import cache_bytes_per_token

MASK_BYTES = 8
"""Per pair of a query and a key: as float32 for the kernel, and as bools while it is made."""

WORKING = 32 << 20
"""Bytes for what does not grow with anything: kernels' scratch, the allocator's rounding."""


def pass_bytes(patch: Patched, tokens: int, chunk: int) -> int:
    """Most bytes that a pass of ``tokens`` holds beyond the weights, when its chunks are bounded as on the CPU.

    The cache; one layer's keys and values twice more, for the cache grows by copying and grouped heads are spread out;
    a chunk's logits, their softmax and its pieces; a chunk's hidden states; and a mask of a chunk against everything
    before it, whose size does not grow with the context since the chunks shrink.
    """
    config = patch.model.config.get_text_config()
    item, layers = patch.model.dtype.itemsize, config.num_hidden_layers
    cache = tokens * cache_bytes_per_token(patch)
    queries = config.num_attention_heads / patch.cached[0]
    layer = int(cache / layers * (1 + 2 * max(queries, 1.0)))
    chunk = chunk_length(min(chunk, tokens), vocab_size_of(patch))
    logits = 4 * chunk * vocab_size_of(patch) * 4
    hidden = 8 * chunk * (config.hidden_size + (getattr(config, "intermediate_size", None) or 4 * config.hidden_size))
    mask = MASK_BYTES * chunk * (FULL_CHUNK_CONTEXT + chunk)
    return int(cache + layer + logits + hidden * item + mask) + WORKING
