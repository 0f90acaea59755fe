"""Plans of recommendations, and results of outcomes made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from service.evaluation.recommend.plan import RecommendPlan, plan_of
from service.evaluation.recommend.request import RecommendRequest
from service.evaluation.recommend.results import RecommendResult
from service.evaluation.recommend.unit import COPIES, RecallUnit
from service.evaluation.unit import Outcome, Plan
from service.models.registry import ModelRegistry
from tests.service.conftest import TEXT
from tests.service.evaluation.prompting import settings_of

LENGTH = 256
GOOD = "self_extend(group_size=6)"

BOTH = [{"method": "yarn", "factor": 4.0}, {"method": "self_extend", "group_size": 6}]
"""The first one is cheaper."""


def ranges_of(result: Any) -> list[dict[str, Any]]:
    return [{"up_to": found.up_to, "pe": found.pe} for found in result.answer.ranges]


def planned(models: ModelRegistry, **fields: Any) -> RecommendPlan:
    body = {"input": TEXT, "length": LENGTH, "windows": 16} | fields
    return plan_of(RecommendRequest.model_validate(body), models, settings_of(Path("tiny")))


def made(
    unit: RecallUnit, nll: float, recall: float, noise: float = 0.0, wavers: float = 0.0, late: float = 0.0
) -> Outcome:
    """An outcome with this NLL and recall, and a difficulty of the window that all candidates share. ``noise`` of the
    NLL is by the window, and ``wavers`` of the recall. ``late`` tokens have so much more."""
    by_window = np.sin(7 * unit.stop)
    harder = (unit.stop * 37 % 101) / 101 + noise * by_window
    recall = min(1.0, max(0.0, recall + wavers * by_window))
    ranks = np.full((COPIES, unit.layout.segment - 1), 2)
    ranks.reshape(-1)[: round(recall * ranks.size)] = 1
    first = np.full_like(ranks, 2)
    tail = np.full(unit.layout.tail, nll + harder)
    return {"nll": tail, "nll_late": tail[:1] + late, "ranks": ranks, "ranks_first": first}


def answered(plan: Plan, made_up: Mapping[str, tuple[float, ...]], own_within: tuple[float, ...]) -> Any:
    """The result, and the last plan, of candidates with these (NLL, recall) by label, or by label and length. All
    others have those of ``others``."""

    def outcome(unit: RecallUnit) -> Outcome:
        label = unit.subject.label
        within = label == "default" and unit.length <= 64
        numbers = made_up.get(f"{label} {unit.length}") or made_up.get(label, made_up["others"])
        return made(unit, *(own_within if within else numbers))

    outcomes: list[Outcome] = []
    extended: Plan | None = plan
    while extended is not None:
        plan = extended
        outcomes += [outcome(unit) for unit in plan.units[len(outcomes) :]]  # type: ignore[arg-type]
        extended = plan.extended(outcomes)
    result = plan.result(outcomes)
    assert isinstance(result, RecommendResult)
    return result, plan
