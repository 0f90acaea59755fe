"""From per-token NLL to a result's sums, intervals, buckets and comparisons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from service.evaluation.scores import Group, Interval
from service.evaluation.statistics.nll import LengthResult, PositionBucket
from service.evaluation.statistics.pieces import pieces_of
from service.evaluation.statistics.student import Mean, mean_of
from service.sharing.stopping import check_wanted

BLOCK = 64
MOST_BLOCKS = 256

TWICE = 32
"""Tokens of a text whose mean NLL varies twice as much as that of a long one."""


@dataclass
class Scored:
    """NLL [n] of one window's scored tokens, their document, the first one's context, their bytes and words."""

    document: int
    nll: np.ndarray
    first_context: int
    bytes: int
    words: int


def length_result(length: int, windows: list[Scored], documents: int) -> LengthResult:
    """Arithmetic over the windows of one method at one length; at least one token must be scored."""
    check_wanted()
    nll = joined(windows)
    total, mean = float(nll.sum()), float(nll.mean())
    # Special tokens alone have no bytes: 1 avoids an infinite result.
    size, words = sum(window.bytes for window in windows), sum(window.words for window in windows)
    groups = groups_of(windows, documents)
    window_means = [float(window.nll.mean()) for window in windows if len(window.nll)]
    return LengthResult(
        length=length,
        perplexity=finite_exp(mean),
        nll_sum=total,
        nll_mean=mean,
        bits_per_byte=total / math.log(2) / max(size, 1),
        byte_perplexity=finite_exp(total / max(size, 1)),
        word_perplexity=finite_exp(total / words) if words else None,
        perplexity_window_mean=finite_exp(float(np.mean(window_means))),
        tokens_scored=len(nll),
        bytes_scored=size,
        words_scored=words,
        windows=len(windows),
        documents=documents,
        interval=interval_of(groups, documents),
        groups=groups,
    )


def joined(windows: Sequence[Scored]) -> np.ndarray:
    """NLL of all windows, one after another."""
    return np.concatenate([np.zeros(0), *(window.nll for window in windows)])


def interval_of(groups: Sequence[Group], documents: int) -> Interval | None:
    """95 % interval of exp(mean NLL) by Student's t: over documents, or over the quarters of the only one. None with
    fewer than three of either. No perplexity is below 1."""
    found = mean_of(pieces_of(groups, documents), TWICE)
    if found is None:
        return None
    mean, half = found.value, found.half
    kind = "documents" if documents > 1 else "quarters"
    return Interval(low=finite_exp(max(mean - half, 0.0)), high=finite_exp(mean + half), kind=kind)


def groups_of(windows: Sequence[Scored], documents: int, counted: Sequence[np.ndarray] | None = None) -> list[Group]:
    """(NLL sum, tokens) of every document, in order; of one document, of at most 256 blocks of its scored tokens.

    ``counted`` bool [n] per window: the other tokens have their place in a block and count for nothing.
    """
    which = [np.ones(len(window.nll), bool) for window in windows] if counted is None else counted
    if documents > 1:
        sums, counts = [0.0] * documents, [0] * documents
        for window, inside in zip(windows, which, strict=True):
            sums[window.document] += float(window.nll[inside].sum())
            counts[window.document] += int(inside.sum())
        return list(zip(sums, counts, strict=True))
    nll, inside = joined(windows), np.concatenate([np.zeros(0, bool), *which])
    size = BLOCK * max(1, math.ceil(len(nll) / (BLOCK * MOST_BLOCKS)))
    blocks = [slice(start, start + size) for start in range(0, len(nll), size)]
    return [(float(nll[block][inside[block]].sum()), int(inside[block].sum())) for block in blocks]


def are_paired(a: Sequence[Group], b: Sequence[Group]) -> bool:
    """True if the pieces of two methods have the same numbers of tokens."""
    return [tokens for _, tokens in a] == [tokens for _, tokens in b]


def paired_probability(a: Sequence[Group], b: Sequence[Group]) -> float | None:
    """Probability that ``a`` has the lower perplexity, from the pieces of two methods over the same tokens.

    It is that of Student's t for the difference per token, so a few pieces are less sure than many. Equal methods
    have a half. None with fewer than three pieces.

    Raises:
        ValueError: when the pieces are not of the same tokens.
    """
    if not are_paired(a, b):
        raise ValueError("the groups of the two methods do not have the same tokens")
    found = _above(b, a)
    return None if found is None else found.above


def surely_apart(a: Sequence[Group], b: Sequence[Group], factor: float) -> bool:
    """True if the 95 % interval of a ratio of perplexities, ``a`` to ``b``, is on one side of ``factor``.

    Both are pieces over the same tokens, so text that is hard for both counts for nothing. False with fewer than three.
    """
    found = _above(a, b)
    return found is not None and abs(found.value - math.log(factor)) >= found.half


def ratio_of(a: Sequence[Group], b: Sequence[Group]) -> tuple[float, tuple[float, float] | None]:
    """The ratio of two perplexities, ``a`` to ``b``, and the ends of its 95 % interval.

    Both are pieces over the same tokens. With fewer than three there is no interval.
    """
    found = _above(a, b)
    if found is None:
        tokens = sum(tokens for _, tokens in a)
        return finite_exp((sum(nll for nll, _ in a) - sum(nll for nll, _ in b)) / tokens), None
    return finite_exp(found.value), (finite_exp(found.value - found.half), finite_exp(found.value + found.half))


def _above(a: Sequence[Group], b: Sequence[Group]) -> Mean | None:
    """The mean NLL per token of ``a`` above that of ``b``."""
    return mean_of([(left - right, tokens) for (left, tokens), (right, _) in zip(a, b, strict=True)], TWICE)


def position_buckets(windows: list[Scored], width: int | None = None) -> list[PositionBucket]:
    """Mean NLL by tokens of context: [0, 16), [16, 32), [32, 64), doubling; with ``width``, bins of as many tokens."""
    context = np.concatenate([np.zeros(0, int), *(w.first_context + np.arange(len(w.nll)) for w in windows)])
    index = context // width if width else np.log2(np.maximum(context, 8) / 8).astype(int)
    sums, counts = np.bincount(index, joined(windows)), np.bincount(index)
    found = []
    for at in np.flatnonzero(counts).tolist():
        start, stop = (at * width, (at + 1) * width) if width else (8 << at if at else 0, 16 << at)
        found.append(
            PositionBucket(start=start, stop=stop, nll_mean=float(sums[at] / counts[at]), tokens=int(counts[at]))
        )
    return found


def finite_exp(nll: float) -> float:
    """exp, with a finite ceiling: JSON has no infinity."""
    return math.exp(min(nll, 700.0))
