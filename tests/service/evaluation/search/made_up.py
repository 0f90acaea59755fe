"""Plans of searches, and results of outcomes made from formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from patches import factors_of
from service.evaluation.search.plan import SearchPlan, plan_of
from service.evaluation.search.request import SearchRequest
from service.evaluation.search.results import SearchResult
from service.evaluation.search.unit import LateUnit
from service.evaluation.unit import Outcome, Plan
from service.models.registry import ModelRegistry
from tests.service.conftest import TEXT
from tests.service.evaluation.prompting import settings_of

LENGTH = 128
SMALL: dict[str, Any] = {"windows": 2, "held_out": 3, "population": 8, "generations": 3}


def planned(models: ModelRegistry, **fields: Any) -> SearchPlan:
    body = {"input": TEXT, "length": LENGTH} | SMALL | fields
    return plan_of(SearchRequest.model_validate(body), models, settings_of(Path("tiny")))


def by_distance(unit: LateUnit) -> float:
    """Least for factors of 3: no start has them."""
    factors = factors_of(unit.method, unit.subject.patch.geometry, unit.length)
    assert factors is not None
    return 2.0 + sum(abs(math.log(factor / 3)) for factor in factors)


def answered(plan: Plan, loss: Callable[[LateUnit], float] = by_distance) -> tuple[SearchResult, SearchPlan]:
    """The result, and the last plan, of units with this loss and a difficulty of the window that all share."""

    def outcome(unit: Any) -> Outcome:
        return {"nll": np.array([loss(unit) + (unit.stop * 37 % 101) / 101])}

    outcomes: list[Outcome] = []
    extended: Plan | None = plan
    while extended is not None:
        plan = extended
        outcomes += [outcome(unit) for unit in plan.units[len(outcomes) :]]
        extended = plan.extended(outcomes)
    result = plan.result(outcomes)
    assert isinstance(result, SearchResult)
    assert isinstance(plan, SearchPlan)
    return result, plan
