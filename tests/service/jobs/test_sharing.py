"""Units that several evaluations of one sweep have in common are measured once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

from service.evaluation.catalogue import plan_of
from service.evaluation.perplexity.plan import WindowsUnit
from service.evaluation.sweep.request import SweepRequest
from service.evaluation.unit import Outcome
from service.jobs.storage.store import JobStore
from service.models.registry import ModelRegistry
from service.settings import Settings
from tests.service.jobs.bench import in_one_run, result_of, running

DOCUMENTS = [[n % 380 + 2 for n in range(start, start + 140)] for start in (0, 7)]
BODY: dict[str, Any] = {
    "methods": [{"method": "linear", "factor": 2.0}, {"method": "dynamic", "factor": 2.0}],
    "lengths": [64, 128],
    "evaluations": [
        {"evaluation": "perplexity", "input": DOCUMENTS, "protocol": "curve"},
        {
            **{"evaluation": "long_perplexity", "input": DOCUMENTS, "protocol": "curve"},
            **{"long_context": 64, "alpha": 0.1, "beta": -9.0},
        },
    ],
}


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("reuse", [True, False])
async def test_a_sweep_measures_the_passes_of_both_perplexities_once(
    store: JobStore, models: ModelRegistry, job_settings: Settings, monkeypatch: pytest.MonkeyPatch, reuse: bool
) -> None:
    request = SweepRequest.model_validate(BODY | {"reuse": reuse})
    plan = plan_of(request, models, job_settings)
    expected = in_one_run(plan)
    plain = len(plan.parts[0].units)
    assert plain == 2 * (1 + 1 + 2), "the checkpoint's own and linear in one pass per document, dynamic in two"
    assert len(plan.units) == 2 * plain + 4, "and the evaluator's long and short passes"
    runs: Counter[str] = Counter()
    run = WindowsUnit.run

    def counted(unit: WindowsUnit) -> Generator[int, None, Outcome]:
        runs[f"{unit.subject.label} {unit.name} {unit.length} {unit.windows}"] += 1
        return (yield from run(unit))

    monkeypatch.setattr(WindowsUnit, "run", counted)
    job = store.add("anna", request, models=["tiny"], units=len(plan.units), tokens=plan.tokens).id
    async with running(store, models, job_settings), asyncio.timeout(60):
        while store.get("anna", job).state in ("queued", "running"):
            await asyncio.sleep(0.01)
    done = store.get("anna", job)
    assert (done.state, done.units_done, done.units_reused) == ("done", 2 * plain + 4, plain)
    assert set(runs.values()) == {1}
    assert runs.total() == plain + 4
    assert result_of(store, "anna", job).numbers() == expected
