"""`recommend` against the best of every candidate in every window, with its share of tokens and CPU time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from benchmarks.quality.method_table import MODELS
from benchmarks.timing import Report, finish
from service.evaluation.formatting import percent, short_number
from service.evaluation.recommend.plan import Reading, RecommendPlan, plan_of
from service.evaluation.recommend.request import RecommendRequest
from service.evaluation.recommend.results import AtLength, RecommendMethod, RecommendResult
from service.evaluation.unit import Outcome, Plan, Unit
from service.models.registry import ModelRegistry
from service.settings import Settings

WINDOWS = {2: 16, 4: 16, 8: 16, 16: 8}
"""Length in units of the trained one -> windows."""


class Measured(NamedTuple):
    """``seconds`` are of CPU time."""

    outcome: Outcome
    seconds: float


class Bench:
    """Units measured once, with their CPU time, which other processes disturb less than the clock."""

    def __init__(self) -> None:
        self._measured: dict[tuple[str, int, str], Measured] = {}

    def units(self, units: Sequence[Unit]) -> list[Measured]:
        return [self._unit(unit) for unit in units]

    def _unit(self, unit: Unit) -> Measured:
        key = (unit.subject.label, unit.length, unit.name)
        if key not in self._measured:
            began = time.process_time()
            outcome = finish(unit.run())
            self._measured[key] = Measured(outcome, time.process_time() - began)
        return self._measured[key]


def run(quick: bool = False) -> Report:
    """All candidates read all windows; the recommendation reads some of these and, beyond them, shorter ones."""
    torch.set_num_threads(1)
    report = Report(
        "recommend_regret",
        "the choice of recommend against the best of a full sweep over the same candidates and windows. "
        "Goal: at most a quarter of the tokens",
        ("model", "times", "recommended", "best of all", "loss above", "perplexity", "recall", "tokens", "CPU time"),
    )
    names = ["ropeway-demo"] if quick else list(MODELS)
    for name in names:
        folder = MODELS[name] / name
        if not (folder / "config.json").is_file():
            report.notes.append(f"{name} is not measured: the model is absent")
            continue
        models = ModelRegistry(Settings(model=str(folder), dtype="float32", device="cpu", _env_file=None))
        try:
            for times, windows in {4: 8}.items() if quick else WINDOWS.items():
                report.add(name, f"{times}", *compared(models, times, windows))
        finally:
            models.close()
    report.notes.append(
        "loss: mean NLL in nats, plus the share of repeated tokens not copied if the model copies at all"
    )
    report.notes.append("perplexity, recall: recommended, best")
    return report


def compared(models: ModelRegistry, times: int, windows: int) -> tuple[str, ...]:
    """One row of the table, without model and length."""
    settings = Settings(_env_file=None)
    request = RecommendRequest(length=times * models.default.trained_length, windows=windows)
    first, bench = plan_of(request, models, settings), Bench()
    chosen, seconds = recommended(first, bench)
    everything = full(first)
    measured = bench.units(everything.units)
    whole = everything.result([outcome for outcome, _ in measured])
    assert isinstance(whole, RecommendResult)
    mine, best = at_target(whole, chosen.answer.label), best_of(whole)
    theirs = at_target(whole, best.label)
    return (
        chosen.answer.label,
        best.label,
        f"{mine.loss - theirs.loss:+.3f}",
        f"{short_number(mine.perplexity)}, {short_number(theirs.perplexity)}",
        f"{percent(mine.recall)}, {percent(theirs.recall)}" if whole.answer.recall_counts else "does not count",
        percent(chosen.tokens_read / sum(unit.tokens for unit in everything.units)),
        percent(seconds / sum(taken for _, taken in measured)),
    )


def recommended(plan: RecommendPlan, bench: Bench) -> tuple[RecommendResult, float]:
    """The recommendation, and the CPU seconds of its units."""
    extended: Plan | None = plan
    current: Plan = plan
    measured: list[Measured] = []
    while extended is not None:
        current = extended
        measured += bench.units(current.units[len(measured) :])
        extended = current.extended([outcome for outcome, _ in measured])
    result = current.result([outcome for outcome, _ in measured])
    assert isinstance(result, RecommendResult)
    return result, sum(taken for _, taken in measured)


def full(plan: RecommendPlan) -> RecommendPlan:
    """Every candidate in every window of the target length, and the reference."""
    schedule = plan.schedule
    reference = [reading for reading in plan.stages[0] if reading.length != schedule.target]
    every = [Reading(subject, schedule.target, 0, schedule.windows) for subject in range(schedule.candidates)]
    return replace(plan, stages=((*reference, *every),))


def best_of(result: RecommendResult) -> RecommendMethod:
    """The least loss among the candidates that may be recommended."""
    allowed = [method for method in result.methods if method.verdict != "windowed"]
    return min(allowed, key=lambda method: at_target(result, method.label).loss)


def at_target(result: RecommendResult, label: str) -> AtLength:
    return next(at for method, at in result.ranked() if method.label == label)
