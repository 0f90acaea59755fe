"""Perplexity results made from formulas, for tests of tables, pictures and the shell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from service.evaluation.perplexity.results import (
    LengthResult,
    MethodResult,
    PerplexityResult,
)
from service.evaluation.results import DocumentInfo
from service.evaluation.scores import Interval

Kind = Literal["documents", "quarters", "blocks"]


def at_length(length: int, perplexity: float, kind: Kind | None = "quarters") -> LengthResult:
    interval = Interval(low=perplexity * 0.95, high=perplexity * 1.06, kind=kind) if kind else None
    nll = math.log(perplexity)
    return LengthResult(
        length=length,
        perplexity=perplexity,
        nll_sum=nll * (length - 1),
        nll_mean=nll,
        bits_per_byte=nll / math.log(2) / 3,
        byte_perplexity=math.exp(nll / 3),
        word_perplexity=math.exp(min(2 * nll, 700)),
        perplexity_window_mean=perplexity,
        tokens_scored=length - 1,
        bytes_scored=3 * (length - 1),
        words_scored=(length - 1) // 2,
        windows=1,
        documents=1,
        interval=interval,
        groups=[(nll * 64, 64)] * ((length - 1) // 64),
    )


def result_of(
    curves: Mapping[str, Sequence[float]],
    lengths: Sequence[int],
    *,
    trained_length: int = 256,
    kind: Kind | None = "quarters",
    documents: Sequence[str] = ("python-reference",),
    models: Mapping[str, str] | None = None,
) -> PerplexityResult:
    """``curves`` maps a label to its perplexities, one per length; ``models`` a label to another model."""
    methods = [
        MethodResult(
            label=label,
            pe={"method": label},
            frequency_hashes=dict.fromkeys(lengths, "0123456789ab"),
            model=(models or {}).get(label, "tiny"),
            passes=1,
            lengths=[at_length(n, p, kind) for n, p in zip(lengths, perplexities, strict=True)],
            nll_by_position=[],
        )
        for label, perplexities in curves.items()
    ]
    return PerplexityResult(
        id="0" * 32,
        model="tiny",
        trained_length=trained_length,
        protocol="curve",
        parameters={},
        bos=False,
        lengths=list(lengths),
        documents=[DocumentInfo(name=name, tokens=5000, bytes=15000) for name in documents],
        methods=methods,
        seconds=1.0,
    )
