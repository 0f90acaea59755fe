"""A calibrated `auto` against every fixed encoding, on a mixture of lengths from 0.5 to 16 times the trained length.

The calibration reads one novel, and the comparison reads others. Every length predicts the same tokens.
Passkeys are hidden from the trained length on: half of it is shorter than their frame.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime

import torch

from benchmarks.quality.method_table import BOOKS, DOCUMENTS, stretches
from benchmarks.timing import Report, finish
from patches import Method
from service.evaluation.formatting import percent, short_number
from service.evaluation.perplexity.plan import plan_of as perplexity_plan
from service.evaluation.perplexity.request import PerplexityRequest
from service.evaluation.perplexity.results import PerplexityResult
from service.evaluation.recommend.plan import plan_of as recommend_plan
from service.evaluation.recommend.request import RecommendRequest
from service.evaluation.recommend.results import RecommendResult
from service.evaluation.retrieval.plan import plan_of as passkey_plan
from service.evaluation.retrieval.request import PasskeyRequest
from service.evaluation.retrieval.results import PasskeyResult
from service.evaluation.unit import evaluate
from service.models.checkpoint.loading import DEMO
from service.models.registry import ModelRegistry, ServedModel
from service.settings import Settings

MODELS = ("ropeway-demo", "ropeway-demo-alibi")
TIMES = (0.5, 1, 2, 4, 8, 16)
TAIL = 96
"""Scored tokens at the end of each window."""
SAMPLES = 2
"""Keys per length and depth: ten at every length."""


def run(quick: bool = False) -> Report:
    """One row per encoding and model: perplexity at every length, and over the mixture."""
    torch.set_num_threads(1)
    times, windows, samples = (TIMES[:3], 4, 1) if quick else (TIMES, 8, SAMPLES)
    report = Report(
        "auto_mixture",
        "perplexity of the calibrated auto and of fixed encodings, by length in units of the trained one. Passkeys "
        "are those found at all lengths (goal: at most 2 % above the best perplexity at each length, the least loss)",
        ("model", "method", *(f"{multiple:g}x" for multiple in times), "all", "worst above best", "passkeys", "loss"),
    )
    if not BOOKS.is_dir():
        report.notes.append("nothing is measured: the books are absent")
        return report
    for name in MODELS:
        models = ModelRegistry(Settings(model=str(DEMO / name), dtype="float32", device="cpu", _env_file=None))
        try:
            served = models.default
            lengths = [round(multiple * served.trained_length) for multiple in times]
            calibrated = calibration(models, lengths, windows)
            methods = [calibrated.policy(datetime.now(UTC)).auto("file"), *fixed(served, calibrated, lengths)]
            reaching = [length for length in lengths if length >= served.trained_length]
            add(report, compared(models, methods, lengths, windows), recalled(models, methods, reaching, samples))
        finally:
            models.close()
        report.notes.append(f"{name}: {'; '.join(f'up to {r.up_to} {r.label}' for r in calibrated.answer.ranges)}")
    report.notes.append("loss: NLL in nats over all lengths, plus the share of passkeys missed")
    return report


def calibration(models: ModelRegistry, lengths: Sequence[int], windows: int) -> RecommendResult:
    beyond = [length for length in lengths if length > models.default.trained_length]
    request = RecommendRequest(lengths=beyond, length=max(beyond), windows=windows, tolerance=0.01)
    result: RecommendResult = finish(evaluate(recommend_plan(request, models, Settings(_env_file=None))))
    return result


def fixed(served: ServedModel, calibrated: RecommendResult, lengths: Sequence[int]) -> list[Method]:
    """The candidates that fit every length."""
    fitting: list[Method] = []
    for method in calibrated.methods:
        asked = PerplexityRequest(methods=[method.request]).methods[0]
        with suppress(ValueError):
            for length in lengths:
                served.patch.resolve(asked, length)
            fitting.append(asked)
    return fitting


def compared(models: ModelRegistry, methods: list[Method], lengths: list[int], windows: int) -> PerplexityResult:
    """Perplexity of every method on other novels than the calibration's."""
    tokens = lengths[-1] + windows * 8 * TAIL
    books = [ids[:tokens] for _, (_, ids) in zip(range(DOCUMENTS), stretches(models.default, tokens), strict=False)]
    request = PerplexityRequest(
        input=books, methods=methods, lengths=lengths, protocol="tail", tail=TAIL, stride=8 * TAIL
    )
    result: PerplexityResult = finish(evaluate(perplexity_plan(request, models, Settings(_env_file=None))))
    return result


def recalled(models: ModelRegistry, methods: list[Method], lengths: list[int], samples: int) -> PasskeyResult:
    """Passkeys of five digits at five depths of the published filler."""
    request = PasskeyRequest(methods=methods, lengths=lengths, samples=samples)
    result: PasskeyResult = finish(evaluate(passkey_plan(request, models, Settings(_env_file=None))))
    return result


def add(report: Report, result: PerplexityResult, passkeys: PasskeyResult) -> None:
    """The rows of one model, the least loss first."""
    best = [min(column) for column in zip(*([at.perplexity for at in m.lengths] for m in result.methods), strict=True)]
    rows = []
    for index, (method, recall) in enumerate(zip(result.methods, passkeys.methods, strict=True)):
        by_length = [at.perplexity for at in method.lengths]
        nll = sum(map(math.log, by_length)) / len(by_length)
        worst = max(value / least - 1 for value, least in zip(by_length, best, strict=True))
        found = sum(at.score for at in recall.lengths) / len(recall.lengths)
        loss = nll + 1 - found
        label = "auto" if index == 0 else method.label
        numbers = (*map(short_number, by_length), short_number(math.exp(nll)), percent(worst), percent(found))
        rows.append((loss, (label, *numbers, f"{loss:.3f}")))
    for _, cells in sorted(rows):
        report.add(result.model, *cells)
