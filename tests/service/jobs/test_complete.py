"""The rest of a plan: methods and lengths whose units are all finished."""

from __future__ import annotations

from typing import Any

import pytest

from service.evaluation.catalogue import EVALUATIONS, plan_of
from service.evaluation.unit import Plan
from service.jobs.partial_results import lacking
from service.jobs.planning import body_of
from service.models.registry import ModelRegistry
from service.settings import Settings
from tests.service.conftest import TEXT
from tests.service.jobs.bench import body

TWO = [TEXT[:3000], TEXT[3000:6000]]


@pytest.fixture(scope="module")
def planning(models: ModelRegistry, job_settings: Settings) -> Any:
    def plan(fields: dict[str, Any]) -> tuple[Any, Plan]:
        request = EVALUATIONS[fields["evaluation"]].request.model_validate(fields)
        return request, plan_of(request, models, job_settings)

    return plan


def test_a_method_is_complete_with_all_its_documents(planning: Any) -> None:
    request, plan = planning(body())
    assert [unit.subject.label for unit in plan.units[:3]] == ["default", "default", "linear(factor=2)"]
    for finished, labels in ((range(1), []), (range(3), ["default"]), (range(4), ["default", "linear"])):
        reduced = plan.reduced(request, set(finished))
        assert [method.method for method in reduced.methods] == labels if labels else reduced is None
    assert [method.method for method in plan.reduced(request, {2, 3, 4}).methods] == ["linear"]


def test_lengths_are_complete_where_no_method_is(planning: Any) -> None:
    fields = {"evaluation": "perplexity", "input": [TEXT, TEXT[100:]], "protocol": "curve", "lengths": [64, 96, 128]}
    request, plan = planning(fields | {"methods": [{"method": "dynamic", "factor": 2.0}, {"method": "default"}]})
    assert [unit.length for unit in plan.units] == [64, 64, 96, 96, 128, 128, 128, 128]
    assert plan.reduced(request, {0}) is None
    for finished, lengths in (({0, 1}, [64]), ({0, 1, 2, 3, 4}, [64, 96]), ({2, 3}, [96]), ({0, 1, 6}, [64])):
        reduced = plan.reduced(request, finished)
        assert ([method.method for method in reduced.methods], reduced.lengths) == (["dynamic"], lengths)
        assert lacking(plan, planning(body_of(reduced))[1], finished) == ["methods", "lengths"]
    both, of_both = planning(fields | {"methods": [{"method": "dynamic", "factor": n} for n in (2.0, 4.0)]})
    assert of_both.reduced(both, {0, 1, 2, 3, 8, 9}).lengths == [96], "the lengths of both"
    assert of_both.reduced(both, {0, 1, 8, 9}) is None


def test_an_encoding_that_repeats_an_answer_is_complete(planning: Any, models: ModelRegistry) -> None:
    """The units have it without the numbers that follow, which were compared. It had no partial result."""
    for methods, finished, kept in (("yarn:4", {0, 1, 2, 3}, None), ("dynamic:2", {0, 1}, [64])):
        echo = models.default.patch.describe(methods, 96)
        request, plan = planning(body(methods=[echo, "default"], lengths=[64, 96], protocol="disjoint", input=TWO))
        assert request.methods[0].follows
        reduced = plan.reduced(request, finished)
        assert ([method.method for method in reduced.methods], reduced.lengths) == ([echo["method"]], kept or [64, 96])
        _, part = planning(body_of(reduced))
        assert [unit.resolved for unit in part.units] == [plan.units[at].resolved for at in sorted(finished)]


@pytest.mark.parametrize("evaluator", ["default", "dynamic:2"])
def test_lengths_are_complete_beside_the_passes_of_an_evaluator(planning: Any, evaluator: str) -> None:
    """Its passes counted as a method with other lengths."""
    fields = {"evaluation": "long_perplexity", "input": TEXT, "protocol": "tail", "lengths": [64, 96]}
    request, plan = planning(fields | {"methods": ["dynamic:2"], "evaluator": {"pe": evaluator}})
    assert [unit.length for unit in plan.units] == [64, 20, 64, 96]
    for finished, lengths in (({0, 1, 2}, [64]), ({0, 1, 3}, [96]), ({2}, [64])):
        assert plan.reduced(request, finished).lengths == lengths
    assert plan.reduced(request, {0, 1}) is None
    _, part = planning(body_of(plan.reduced(request, {0, 1, 2})))
    assert [unit.length for unit in part.units] == [64, 20, 64]


def test_a_sweep_keeps_whole_evaluations_or_the_first_ones_methods(planning: Any) -> None:
    curve = {"evaluation": "perplexity", "input": TEXT, "protocol": "curve"}
    parts = [curve, {"evaluation": "long_perplexity", "input": TEXT}]
    methods = [{"method": "yarn", "factor": 2.0}, {"method": "none"}]
    fields = {"evaluation": "sweep", "evaluations": parts, "methods": methods, "factors": [2, 4], "lengths": [64, 256]}
    request, plan = planning(fields)
    first = len(plan.parts[0].units)
    labels = [subject.label for subject in plan.subjects]
    assert labels == ["default", "yarn(factor=2)", "yarn(factor=4)", "none"]
    whole = plan.reduced(request, set(range(first + 1)))
    assert [part.evaluation for part in whole.evaluations] == ["perplexity"]
    some = plan.reduced(request, set(range(2)))
    assert [part.evaluation for part in some.evaluations] == ["perplexity"]
    assert [method.method for method in some.methods] == ["default", "yarn"]
    for done, lacks in ((first + 1, ["evaluations"]), (2, ["methods", "evaluations"]), (len(plan.units), [])):
        finished = set(range(done))
        _, reduced = planning(body_of(plan.reduced(request, finished)))
        assert lacking(plan, reduced, finished) == lacks
    assert plan.reduced(request, set()) is None
