"""Results of the evaluations that measure, made from formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from service.evaluation.long_perplexity.results import (
    EvaluatorInfo,
    LongLengthResult,
    LongMethodResult,
    LongPerplexityResult,
)
from service.evaluation.perplexity.results import PerplexityResult
from service.evaluation.probe.results import Attention, Copying, DistanceBucket, HeadAttention, ProbeMethod, ProbeResult
from service.evaluation.results import DocumentInfo
from service.evaluation.retrieval.results import DepthMethod, DepthScore, LengthScore, PasskeyResult
from service.evaluation.ruler.request import TaskName
from service.evaluation.ruler.results import RulerMethod, RulerResult, TaskScore
from service.evaluation.scores import Interval
from service.evaluation.statistics.nll import PositionBucket
from service.evaluation.statistics.proportion import wilson
from tests.service.results import result_of

NAMES = ("default", "yarn(factor=8)", "alibi", "linear(factor=4)")
LENGTHS = (256, 512, 1024, 2048)
DOCUMENT = DocumentInfo(name="python-reference", tokens=5000, bytes=15000)


def perplexity(names: Sequence[str] = NAMES, **more: Any) -> PerplexityResult:
    """The first one breaks down past 256 tokens, the others get better or slowly worse."""
    curves = {
        name: [6.5, 90.0, 300.0, 400.0] if index == 0 else [6.6 + index * 0.3 + step * 0.21 for step in range(4)]
        for index, name in enumerate(names)
    }
    result = result_of(curves, LENGTHS, **more)
    for index, method in enumerate(result.methods):
        edges = [0, 16, 32, 64, 128, 256, 512, 1024, 2048]
        method.nll_by_position = [
            PositionBucket(
                start=start,
                stop=stop,
                nll_mean=2.6 - 0.1 * step + (0.9 * max(step - 4, 0) if index == 0 else 0.05 * index),
                tokens=stop - start,
            )
            for step, (start, stop) in enumerate(pairwise(edges))
        ]
    return result


def share_at(index: int, length: int, depth: float) -> float:
    """Everything is found at the trained length; past it, less the farther back, and less by the first methods."""
    return 1.0 if length <= 256 else round(4 * min(1.0, (index + depth) * 256 / length)) / 4


def passkey(names: Sequence[str] = NAMES, depths: Sequence[float] = (0, 0.25, 0.5, 0.75, 1)) -> PasskeyResult:
    methods = []
    for index, name in enumerate(names):
        cells = [
            DepthScore(
                length=length,
                depth=depth,
                samples=4,
                score=share_at(index, length, depth),
                interval=wilson(round(4 * share_at(index, length, depth)), 4),
                answer_nll=0.1 + 3 * (1 - share_at(index, length, depth)),
                answer_accuracy=share_at(index, length, depth),
                outputs=[],
            )
            for length in LENGTHS
            for depth in depths
        ]
        lengths = []
        for length in LENGTHS:
            found = [cell.score for cell in cells if cell.length == length]
            mean, samples = math.fsum(found) / len(found), 4 * len(found)
            lengths.append(
                LengthScore(
                    length=length,
                    samples=samples,
                    score=mean,
                    interval=wilson(round(mean * samples), samples),
                    answer_nll=0.1 + 3 * (1 - mean),
                    answer_accuracy=mean,
                )
            )
        methods.append(DepthMethod(label=name, pe={"method": name}, model="tiny", cells=cells, lengths=lengths))
    return PasskeyResult(
        model="tiny",
        trained_length=256,
        lengths=list(LENGTHS),
        depths=list(depths),
        samples=4,
        seed=0,
        max_new_tokens=10,
        bos=False,
        documents=[],
        methods=methods,
        digits=5,
    )


def buckets(sharpness: float) -> list[DistanceBucket]:
    """Masses over doubling distances that sum to 1."""
    edges = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    weights = [math.exp(-sharpness * step) + 0.02 * step for step in range(len(edges) - 1)]
    return [
        DistanceBucket(start=start, stop=stop, mass=weight / sum(weights))
        for start, stop, weight in zip(edges[:-1], edges[1:], weights, strict=True)
    ]


def probe(names: Sequence[str] = NAMES) -> ProbeResult:
    methods = []
    for index, name in enumerate(names):
        at = {"length": 1024, "first_keys": 0.1 + index / 10, "entropy": 3.0}
        heads = [
            HeadAttention(**at, layer=layer, head=head, buckets=buckets(0.1 * (1 + index + layer + head)))
            for layer in range(2)
            for head in range(4)
        ]
        copies = [
            Copying(
                distance=distance,
                accuracy=round(128 / (1 + distance / 256 / (1 + index))) / 128,
                interval=wilson(round(128 / (1 + distance / 256 / (1 + index))), 128),
                nll_mean=1.0,
                accuracy_first=0.125,
                nll_first=5.5,
                tokens=128,
            )
            for distance in (16, 64, 256, 512)
        ]
        methods.append(
            ProbeMethod(
                label=name,
                pe={"method": name},
                model="tiny",
                attention=heads,
                attention_mean=[Attention(**at, buckets=buckets(0.1 * (2 + index)))],
                copying=copies,
                nll_by_position=perplexity([name]).methods[0].nll_by_position,
            )
        )
    return ProbeResult(
        model="tiny",
        trained_length=256,
        bos=False,
        lengths=[1024],
        queries=64,
        distances=[16, 64, 256, 512],
        samples=8,
        segment=16,
        segment_of="random",
        seed=0,
        documents=[DOCUMENT],
        methods=methods,
    )


TASKS: tuple[TaskName, ...] = ("niah_single_1", "niah_multikey_2", "vt")


def ruler(names: Sequence[str] = NAMES) -> RulerResult:
    """The first method's average is nowhere above the threshold."""
    methods = []
    for index, name in enumerate(names):
        tasks, lengths = [], []
        for length in LENGTHS:
            shares = [0.8 * share_at(index, length, depth) if index == 0 else share_at(index, length, depth)
                      for depth in (0, 0.5, 1)]  # fmt: skip
            averages = [_averages(share, 4) for share in shares]
            tasks += [
                TaskScore(**average, length=length, task=task, outputs=[])
                for task, average in zip(TASKS, averages, strict=True)
            ]
            lengths.append(LengthScore(**_averages(math.fsum(shares) / 3, 12), length=length))
        passed = [at.length for at in lengths if at.score > 0.856]
        methods.append(
            RulerMethod(
                label=name,
                pe={"method": name},
                model="tiny",
                tasks=tasks,
                lengths=lengths,
                effective_length=max(passed, default=None),
            )
        )
    return RulerResult(
        model="tiny",
        trained_length=256,
        lengths=list(LENGTHS),
        tasks=list(TASKS),
        samples=4,
        seed=0,
        threshold=0.856,
        parameters={},
        bos=False,
        documents=[],
        methods=methods,
    )


def _averages(share: float, samples: int) -> dict[str, Any]:
    return {
        "samples": samples,
        "score": share,
        "interval": wilson(round(share * samples), samples),
        "answer_nll": 2.0 - share,
        "answer_accuracy": share,
    }


def long_perplexity(names: Sequence[str] = NAMES) -> LongPerplexityResult:
    """Twice the perplexity; no key token at the shortest length."""
    whole = perplexity(names)
    methods = [
        LongMethodResult(
            label=method.label,
            pe=method.pe,
            model=method.model,
            lengths=[
                LongLengthResult(
                    length=at.length,
                    long_perplexity=2 * at.perplexity if at.length > 256 else None,
                    nll_sum=at.nll_sum,
                    nll_mean=at.nll_mean if at.length > 256 else None,
                    key_tokens=64 if at.length > 256 else 0,
                    key_fraction=0.1,
                    perplexity=at.perplexity,
                    tokens_scored=at.tokens_scored,
                    interval=Interval(low=1.9 * at.perplexity, high=2.2 * at.perplexity, kind="blocks"),
                    groups=[],
                )
                for at in method.lengths
            ],
        )
        for method in whole.methods
    ]
    evaluator = EvaluatorInfo(
        label="default",
        pe={"method": "default"},
        model="tiny",
        long_context=256,
        short_context=32,
        stride=64,
        alpha=2.0,
        beta=-2.0,
        tokens=2048,
        key_tokens=205,
    )
    return LongPerplexityResult(
        model="tiny",
        trained_length=256,
        evaluator=evaluator,
        protocol="curve",
        parameters={},
        bos=False,
        lengths=list(LENGTHS),
        documents=[DOCUMENT],
        methods=methods,
    )
