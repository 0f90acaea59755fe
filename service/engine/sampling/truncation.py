"""Truncation of distributions: of ``weights`` [n, vocabulary], unlikely ones become zero in place.

``numbers`` has one for each row. On a CPU, numpy finds the last weight that stays, row by row. On a card, all rows are
one call, since the host must not wait for numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from patches import uploaded

BLOCK = 256
"""Weights that are summed or compared first, so that few others need a look."""


def keep_min_p(weights: torch.Tensor, numbers: Sequence[float]) -> None:
    """Zero all below these shares of the row's largest weight, which is 1 (Nguyen et al., arXiv:2407.01082)."""
    _keep_from(weights, uploaded(torch.tensor(numbers), weights.device)[:, None])


def keep_top_k(weights: torch.Tensor, numbers: Sequence[int]) -> None:
    """Zero all but so many of the largest of each row. Equals of the last one stay."""
    if weights.device.type == "cpu":
        least = [_least_of_top_k(*each) for each in zip(weights.numpy(), numbers, strict=True)]
        _keep_from(weights, weights.new_tensor(least)[:, None])
    else:
        last = uploaded(torch.tensor(numbers), weights.device)[:, None] - 1
        _keep_from(weights, weights.topk(max(numbers), dim=-1).values.gather(-1, last))


def keep_top_p(weights: torch.Tensor, numbers: Sequence[float]) -> None:
    """Zero all but the largest of each row that reach these shares of its sum. Equals of the last one stay."""
    if weights.device.type == "cpu":
        least = [_least_of_top_p(*each) for each in zip(weights.numpy(), numbers, strict=True)]
        _keep_from(weights, weights.new_tensor(least)[:, None])
    else:
        top_p = uploaded(torch.tensor(numbers, dtype=torch.float64), weights.device)
        _keep_from(weights, _least_by_order(weights.sort(dim=-1, descending=True).values, top_p[:, None]))


def _keep_from(weights: torch.Tensor, least: torch.Tensor) -> None:
    """Zero all below ``least`` [n, 1]. A mask takes ten times as long as a threshold, which has one number."""
    if weights.device.type != "cpu":
        weights.masked_fill_(weights < least, 0.0)
        return
    below = least.nextafter(torch.full_like(least, -math.inf))[:, 0].tolist()
    for row, number in zip(weights, below, strict=True):
        torch.threshold_(row, number, 0.0)


def _least_by_order(ordered: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The last [n, 1] of falling weights [n, m] that begins below ``top_p`` [n, 1] of their sum."""
    sums = ordered.cumsum(-1, dtype=torch.float64)
    kept = (sums - ordered < top_p * sums[:, -1:]).sum(-1, keepdim=True).clamp_min(1)
    return ordered.gather(-1, kept - 1)


def _least_of_top_k(weights: np.ndarray, top_k: int) -> float:
    """The ``top_k``-th largest of weights [m]; 0 if some are no numbers.

    So many blocks have a weight from their largest ones on. The ``top_k``-th of these is a bound.
    """
    largest = np.maximum.reduceat(weights, np.arange(0, len(weights), BLOCK))
    likely = weights[weights >= _last(largest, top_k)] if top_k <= len(largest) else weights
    return _last(likely, top_k) if top_k <= len(likely) else 0.0


def _last(weights: np.ndarray, top_k: int) -> float:
    return float(np.partition(weights, -top_k)[-top_k])


def _least_of_top_p(weights: np.ndarray, top_p: float) -> float:
    """``_least_by_order`` of weights [m] in any order; 0 without a finite sum."""
    total = float(weights.sum(dtype=np.float64))
    if not math.isfinite(total):
        return 0.0
    # All weights below this one have half of what top-p leaves out, or less.
    likely = weights[np.flatnonzero(weights >= (1.0 - top_p) / 2 * total / len(weights))]
    ordered = np.ascontiguousarray(np.sort(likely)[::-1])
    sums = np.add.reduceat(ordered, np.arange(0, len(ordered), BLOCK), dtype=np.float64).cumsum()
    block = min(int(np.searchsorted(sums, top_p * total)), len(sums) - 1)
    inside = ordered[block * BLOCK : (block + 1) * BLOCK]
    before = sums[block - 1] if block else 0.0
    last = int(np.searchsorted(before + inside.cumsum(dtype=np.float64), top_p * total))
    return float(inside[min(last, len(inside) - 1)])
