"""Attention of many queries to many keys by oneDNN's products, where these are faster than torch's kernel.

On a CPU, torch's kernel multiplies by MKL, which gives AMD's processors kernels of half their width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import torch
import torch.nn.functional as F

from patches.timing import fastest

LEAST_QUERIES = 128
LEAST_KEYS = 1024
"""With fewer queries or keys, the calls take longer than they save."""
QUERIES, KEYS = 256, 1024
"""Sizes of a block of scores, which then stays in a core's cache."""


def takes(query: torch.Tensor, key: torch.Tensor) -> bool:
    """True if this way is faster for float32 ``query`` [rows, heads, q, head_dim] and as many heads of keys."""
    return (
        query.dtype == torch.float32
        and query.device.type == "cpu"
        and query.shape[1] == key.shape[1]
        and query.shape[2] >= LEAST_QUERIES
        and key.shape[2] >= LEAST_KEYS
        and attends_by_onednn(torch.get_num_threads())
    )


@cache
def attends_by_onednn(threads: int) -> bool:
    """True if this processor takes less time in this way with so many ``threads``, the number that torch has now."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    with torch.inference_mode():
        query, key = torch.ones(1, 1, 2 * QUERIES, 64), torch.ones(1, 1, 2 * KEYS, 64)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return fastest([partial(kernel, query, key, key), partial(attend, query, key, key, 1.0)]) == 1


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``sdpa_with_lse`` without a bias, for float32 states with as many heads of queries as of keys."""
    rows, heads, new, _ = query.shape
    out = query.new_empty(rows, heads, new, value.shape[-1])
    lse = query.new_empty(rows, heads, new)
    for row in range(rows):
        for head in range(heads):
            pairs = zip(key[row, head].split(KEYS), value[row, head].split(KEYS), strict=True)
            blocks = [(_whole(keys, KEYS), _whole(values, KEYS).t().contiguous(), len(keys)) for keys, values in pairs]
            for start in range(0, new, QUERIES):
                part = query[row, head, start : start + QUERIES] * scaling
                found, sums = _block(_whole(part, QUERIES), blocks)
                place = row, head, slice(start, start + len(part))
                out[place], lse[place] = found[: len(part)], sums[: len(part)]
    return out, lse


def _whole(states: torch.Tensor, size: int) -> torch.Tensor:
    """``states`` [n, dim] with rows of zeros up to ``size``. oneDNN compiles a kernel for each shape, and keeps it."""
    return F.pad(states, (0, 0, 0, size - len(states))) if len(states) < size else states.contiguous()


def _block(
    query: torch.Tensor, blocks: Sequence[tuple[torch.Tensor, torch.Tensor, int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [q, dim] and log-sum-exp [q] by one online softmax over ``blocks``.

    A block has keys, transposed values, and the number of keys that count.
    """
    multiplied = torch.ops.mkldnn._linear_pointwise
    top = query.new_full((len(query), 1), float("-inf"))
    total, out = torch.zeros_like(top), query.new_zeros(len(query), blocks[0][1].shape[0])
    for keys, values, count in blocks:
        scores = multiplied(query, keys, None, "none", [], "")
        scores[:, count:] = float("-inf")
        new = torch.maximum(top, scores.amax(1, keepdim=True))
        weights, shrink = scores.sub_(new).exp_(), top.sub_(new).exp_()
        out = torch.addcmul(multiplied(weights, values, None, "none", [], ""), out, shrink)
        total, top = torch.addcmul(weights.sum(1, keepdim=True), total, shrink), new
    return out.div_(total), total.log_().add_(top)[:, 0]
