"""A recommendation and the systems that can express its candidates."""

from __future__ import annotations

from typing import Any

import pytest

from service.evaluation.checks import InvalidEvaluation
from service.evaluation.recommend.plan import RecommendPlan
from service.export.targets import TARGETS, carriers
from service.models.registry import ModelRegistry
from tests.service.evaluation.recommend.made_up import BOTH, GOOD, LENGTH, answered, planned


def test_an_answer_that_no_system_can_express_says_so_and_names_one_that_is(models: ModelRegistry) -> None:
    methods = [{"method": "rerope"}, *BOTH]
    made_up = {"others": (3.0, 0.1), "rerope": (2.0, 0.8), "yarn(factor=4)": (2.25, 0.8), GOOD: (4.0, 0.8)}
    found, _ = answered(planned(models, methods=methods), made_up, (2.0, 0.9))
    assert (found.answer.label, found.answer.exports_to, found.answer.exportable) == ("rerope", [], "yarn(factor=4)")
    assert (
        "No system that Ropeway exports to can express it; the best finalist that one can is yarn(factor=4) "
        "(transformers, vllm, sglang, llama.cpp, exllamav3 and tgi), with 0.250 more loss."
    ) in found.words()
    for label, systems in (("yarn(factor=4)", list(TARGETS)), (GOOD, ["llama.cpp"])):
        best, _ = answered(planned(models, methods=methods), made_up | {label: (1.0, 0.9)}, (2.0, 0.9))
        assert (best.answer.label, best.answer.exports_to, best.answer.exportable) == (label, systems, label)
        assert (best.answer.exportable_to, best.answer.target) == (systems, None)
        assert "No system" not in " ".join(best.words())
        close = [words for words in best.words() if "is not exact" in words]
        assert len(close) == (systems == ["llama.cpp"])
        assert all(f"The export of {label} to llama.cpp" in words for words in close)
        assert all("in blocks of" in words and "`llama-server` has no group attention" in words for words in close)


@pytest.mark.parametrize("methods", [[{"method": "rerope"}], BOTH[1:]])
def test_a_system_that_can_express_the_own_encoding_alone_is_no_error(
    models: ModelRegistry, methods: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(models, target="tgi", methods=methods)
    assert [subject.label for subject in plan.subjects] == ["default"]
    config = models.default.patch.model.config
    monkeypatch.setattr(config, "position_encoding", {"method": "default"}, raising=False)
    with pytest.raises(InvalidEvaluation, match=r"target: tgi can express no candidate .* only Ropeway reads"):
        planned(models, target="tgi", methods=methods)


def test_for_a_system_what_it_can_express_alone_is_compared(models: ModelRegistry) -> None:
    """self_extend is for llama.cpp alone. It was better, and yarn left early."""
    made_up = {"others": (3.0, 0.1), "yarn(factor=4)": (2.25, 0.8), GOOD: (2.0, 0.8), "rerope": (1.9, 0.8)}
    for system, label in (("vllm", "yarn(factor=4)"), ("llama.cpp", GOOD)):
        plan = planned(models, target=system)
        assert all(system in (carriers(each.method, each.patch, LENGTH) or ()) for each in plan.subjects)
        result, _ = answered(plan, made_up, (2.0, 0.9))
        assert (result.answer.label, result.answer.target) == (label, system)
        assert f"Only candidates that {system} can express were compared." in result.words()


@pytest.mark.parametrize(("windows", "finalists"), [(4, 7), (16, 3)])
def test_the_best_that_a_system_can_express_is_measured_to_the_end(
    models: ModelRegistry, windows: int, finalists: int
) -> None:
    """It left after the first round, and the own encoding was named the best one: that to avoid."""
    plan = planned(models, windows=windows)
    better = dict.fromkeys(inexpressible(plan), (2.0, 0.0))
    made_up = {"others": (3.0, 0.0), "default": (9.0, 0.0), "yarn(factor=4)": (2.2, 0.0)}
    result, last = answered(plan, made_up | better, (2.0, 0.0))
    ends = [method.label for method in result.methods if method.rounds == len(plan.schedule.read)]
    assert len(ends) == finalists
    assert {"default", "yarn(factor=4)"} < set(ends)
    assert (result.answer.exports_to, result.answer.exportable) == ([], "yarn(factor=4)")
    assert "default" in {avoided.label for avoided in result.answer.avoid}
    assert last.cost.tokens <= plan.cost.tokens


def inexpressible(plan: RecommendPlan) -> list[str]:
    """Candidates that attend to all tokens, and that no system can express."""
    found = [each for each in plan.subjects if carriers(each.method, each.patch, LENGTH) == []]
    labels = [each.label for each in found if each.patch.resolve(each.method, LENGTH).recipe.sink_window is None]
    assert len(labels) > 2
    return labels


def test_an_encoding_to_avoid_is_not_named_for_export(models: ModelRegistry) -> None:
    methods = [{"method": "rerope"}, {"method": "leaky_rerope", "scaling_factor": 4}]
    made_up = {"others": (2.0, 0.8), "default": (9.0, 0.1)}
    result, _ = answered(planned(models, methods=methods), made_up, (2.0, 0.9))
    assert (result.answer.exports_to, result.answer.exportable) == ([], None)
    assert [avoided.label for avoided in result.answer.avoid] == ["default"]
    says = "No system that Ropeway exports to can express it; finalists that one can are to be avoided: default."
    assert says in result.words()
