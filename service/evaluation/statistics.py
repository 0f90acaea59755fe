"""From per-token NLL to what a result reports: sums, intervals, buckets."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from service.evaluation.results import Interval, LengthResult, PositionBucket

BLOCK = 64
RESAMPLES = 1000


@dataclass
class Scored:
    """NLL [n] of one window's scored tokens, their document, their context lengths' start, and bytes."""

    document: int
    nll: np.ndarray
    first_context: int
    bytes: int


def length_result(length: int, windows: list[Scored], documents: int) -> LengthResult:
    """Arithmetic over the windows of one method at one length; at least one token must be scored."""
    nll = np.concatenate([window.nll for window in windows])
    total_bytes = sum(window.bytes for window in windows)
    mean = float(nll.mean())
    window_means = [float(window.nll.mean()) for window in windows if len(window.nll)]
    return LengthResult(
        length=length,
        perplexity=_exp(mean),
        nll_sum=float(nll.sum()),
        nll_mean=mean,
        bits_per_byte=float(nll.sum()) / math.log(2) / max(total_bytes, 1),
        perplexity_window_mean=_exp(float(np.mean(window_means))),
        tokens_scored=len(nll),
        bytes_scored=total_bytes,
        windows=len(windows),
        documents=documents,
        interval=interval(windows),
    )


def interval(windows: list[Scored]) -> Interval | None:
    """95 % interval of exp(mean NLL): bootstrap over documents, or blocks of the only document."""
    sums: dict[int, float] = {}
    counts: dict[int, int] = {}
    for window in windows:
        sums[window.document] = sums.get(window.document, 0.0) + float(window.nll.sum())
        counts[window.document] = counts.get(window.document, 0) + len(window.nll)
    if len(sums) > 1:
        total, count = np.array(list(sums.values())), np.array(list(counts.values()))
        drawn = np.random.default_rng(0).integers(0, len(total), (RESAMPLES, len(total)))
        low, high = np.quantile(total[drawn].sum(1) / count[drawn].sum(1), [0.025, 0.975])
        return Interval(low=_exp(float(low)), high=_exp(float(high)), kind="documents")
    nll = np.concatenate([window.nll for window in windows])
    blocks = len(nll) // BLOCK
    if blocks < 2:
        return None
    means = nll[: blocks * BLOCK].reshape(blocks, BLOCK).mean(1)
    error = 1.96 * float(means.std(ddof=1)) / math.sqrt(blocks)
    mean = float(nll.mean())
    return Interval(low=_exp(mean - error), high=_exp(mean + error), kind="blocks")


def position_buckets(windows: list[Scored]) -> list[PositionBucket]:
    """Mean NLL by tokens of context: [0, 16), [16, 32), [32, 64), doubling."""
    sums: dict[int, float] = {}
    counts: dict[int, int] = {}
    for window in windows:
        context = window.first_context + np.arange(len(window.nll))
        bucket = np.where(context < 16, 0, np.log2(np.maximum(context, 1) / 8).astype(int))
        for index in np.unique(bucket):
            inside = bucket == index
            sums[int(index)] = sums.get(int(index), 0.0) + float(window.nll[inside].sum())
            counts[int(index)] = counts.get(int(index), 0) + int(inside.sum())
    return [
        PositionBucket(
            start=0 if index == 0 else 8 << index,
            stop=8 << (index + 1),
            nll_mean=sums[index] / counts[index],
            tokens=counts[index],
        )
        for index in sorted(sums)
    ]


def _exp(nll: float) -> float:
    """exp, with a finite ceiling: JSON has no infinity."""
    return math.exp(min(nll, 700.0))
