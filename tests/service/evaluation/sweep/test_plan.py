"""Plans of sweeps: methods by factors, lengths, parts with the numbers of evaluations alone, and refused bodies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from patches import parse
from service.evaluation.checks import InvalidEvaluation
from service.evaluation.perplexity.plan import plan_of as perplexity_plan
from service.evaluation.perplexity.request import PerplexityRequest
from service.evaluation.sweep.plan import plan_of
from service.evaluation.sweep.request import SweepRequest
from service.evaluation.unit import evaluate
from service.models.registry import ModelRegistry
from tests.service.conftest import TEXT
from tests.service.evaluation.prompting import finish, settings_of
from tests.service.evaluation.sweep.made_up import YARN

LINEAR = {"method": "linear", "factor": 2.0}
PART: dict[str, Any] = {"evaluation": "perplexity", "input": TEXT}
NEEDLE: dict[str, Any] = {
    **{"evaluation": "needle", "input": TEXT, "samples": 1, "depths": [0.5], "max_new_tokens": 2},
    **{"needle": "It is Q.", "question": "It is", "expected": ["Q"]},
}


def plan(models: ModelRegistry, **body: Any) -> Any:
    return plan_of(SweepRequest(**body), models, settings_of(Path("tiny")))


def labels(request: SweepRequest) -> list[str]:
    return [f"{method.method}:{getattr(method, 'factor', '-')}" for method in request.expanded()]


def test_every_method_that_takes_a_factor_is_measured_under_each() -> None:
    body = {"methods": [LINEAR, {"method": "none"}, YARN], "factors": [2, 8]}
    assert labels(SweepRequest(**body)) == ["linear:2.0", "linear:8.0", "none:-", "yarn:2.0", "yarn:8.0"]
    repeated = SweepRequest(methods=[LINEAR, {"method": "linear", "factor": 8.0}], factors=[2, 8])
    assert labels(repeated) == ["linear:2.0", "linear:8.0"]


@pytest.mark.parametrize("linear", ["linear", {"method": "linear"}])
def test_a_method_needs_no_factor_beside_factors(linear: Any) -> None:
    assert labels(SweepRequest(methods=[linear, "none"], factors=[2, 8])) == ["linear:2.0", "linear:8.0", "none:-"]
    assert labels(SweepRequest(methods=linear, factors=[4])) == ["linear:4.0"]
    with pytest.raises(ValidationError, match="factor"):
        SweepRequest(methods=[linear])


def test_a_stored_request_has_no_factor_that_is_not_measured() -> None:
    assert SweepRequest(methods=["yarn"], factors=[4, 8]).methods[0].factor == 4  # type: ignore[list-item, union-attr]


def test_factors_keep_the_other_parameters() -> None:
    (method,) = SweepRequest(methods=[YARN | {"beta_fast": 16.0}], factors=[8]).expanded()
    assert method == parse({"method": "yarn", "factor": 8.0, "beta_fast": 16.0})


def test_the_parts_are_the_evaluations_alone(models: ModelRegistry) -> None:
    own, part = {"protocol": "tail", "tail": 16}, PART | {"input": TEXT[:8000]}
    whole = finish(evaluate(plan(models, methods=[YARN, LINEAR], lengths=[64, 128], evaluations=[part | own, part])))
    methods = [{"method": "default"}, YARN, LINEAR]
    for found, options in zip(whole.evaluations, (own, {"protocol": "tail", "windows": 8}), strict=True):
        request = PerplexityRequest(input=part["input"], methods=methods, lengths=[64, 128], **options)
        alone = finish(evaluate(perplexity_plan(request, models, settings_of(Path("tiny")))))
        assert found.numbers() == alone.numbers()


def test_perplexity_in_a_sweep_scores_the_same_tokens_at_every_length(models: ModelRegistry) -> None:
    """Under `curve`, the reference length has other tokens than the target, and the limit was theirs."""
    for parts in ([PART], [{"evaluation": "perplexity", "input": TEXT, "tail": 16}], ["perplexity"], None):
        body = {} if parts is None else {"evaluations": parts}
        (part,) = plan(models, methods=[YARN], lengths=[64, 256], **body).parts
        assert (part.protocol, part.most_windows) == ("tail", 8)
        for document in part.documents:
            scored = [{(w.first_scored, w.stop) for w in part.windows(document, length)} for length in (64, 256)]
            assert scored[0] == scored[1]
            assert len(scored[0]) <= 8
    (curve,) = plan(models, methods=[YARN], lengths=[64, 256], evaluations=[PART | {"protocol": "curve"}]).parts
    assert curve.protocol == "curve"


def test_a_table_has_every_length_and_judges_the_target(models: ModelRegistry) -> None:
    whole = finish(evaluate(plan(models, methods=[YARN], lengths=[32, 64, 128], evaluations=[PART])))
    rows = whole.rows()
    assert [(row["method"], row["length"]) for row in rows] == [
        (method.label, length) for method in whole.methods for length in (32, 64, 128)
    ]
    by_method = whole.evaluations[0].scores().by_method
    assert [row["value"] for row in rows] == [scores[length].value for scores in by_method for length in (32, 64, 128)]
    assert [row["rank"] is None for row in rows] == [True, True, False] * len(whole.methods)


def test_the_order_of_units_does_not_matter(models: ModelRegistry) -> None:
    sweep = plan(
        models,
        methods=[YARN],
        lengths=[64, 128],
        evaluations=[PART, NEEDLE],
    )
    forwards = [finish(unit.run()) for unit in sweep.units]
    backwards = [finish(unit.run()) for unit in reversed(sweep.units)][::-1]
    assert sweep.result(forwards).numbers() == sweep.result(backwards).numbers()
    kinds = {type(part).__name__ for part in sweep.result(forwards).evaluations}
    assert kinds == {"PerplexityResult", "NeedleResult"}


def test_a_target_within_training_is_compared_with_the_model_itself_there(models: ModelRegistry) -> None:
    """It was compared with the longest measured length of the training, where more context helps every token."""
    sweep = plan(models, methods=[YARN], lengths=[24, 48, 64], target={"length": 32}, evaluations=[PART])
    assert (sweep.within, sweep.target) == (32, 32)


def test_a_length_within_training_and_the_target_are_measured_too(models: ModelRegistry) -> None:
    sweep = plan(models, methods=[YARN], lengths=[128], target={"length": 256}, evaluations=[PART])
    assert sweep.parts[0].lengths == [64, 128, 256]
    assert (sweep.within, sweep.target) == (64, 256)
    assert [subject.label for subject in sweep.subjects] == ["default", "yarn(factor=4)"]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"evaluations": [PART], "lengths": [1 << 20]}, "lengths", "beyond"),
        ({"evaluations": [PART | {"protocol": "tail", "tail": 64}], "lengths": [64]}, "evaluations.0.tail", "below"),
        ({"evaluations": [PART], "methods": [{"method": "t5_bias"}]}, "methods", "t5_bias: "),
        ({"evaluations": [PART | {"input": ["A text.", "read.txt"]}]}, "evaluations.0.input", r"input: input\[1\]: '"),
    ],
    ids=["lengths", "part", "method", "document"],
)
def test_what_is_wrong_is_named(models: ModelRegistry, body: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidEvaluation, match=message) as refused:
        plan(models, **body)
    assert refused.value.param == param
    assert str(refused.value).count(param) == 1


def test_lengths_that_the_sweep_adds_are_named_where_one_is_at_fault(models: ModelRegistry) -> None:
    with pytest.raises(InvalidEvaluation, match=r"64 tokens are too few.*; a sweep also measures 64 ") as refused:
        plan(models, methods=[YARN], lengths=[512], target={"length": 512}, evaluations=["passkey"])
    assert refused.value.param == "lengths"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"evaluations": [PART | {"lengths": [64]}]}, "lengths belong to the sweep itself"),
        ({"evaluations": [{"evaluation": "sweep"}]}, "evaluation"),
        ({"methods": [{"method": "none"}], "factors": [2]}, "none of the methods takes a factor"),
        ({"factors": [0.5], "methods": [YARN]}, "greater than or equal to 1"),
        ({"factors": [5000], "methods": [YARN]}, "must be at most 4096, not 5000"),
        ({"target": {"tolerance": -0.1}}, "greater than or equal to 0"),
        ({"input": "A text."}, r"unknown field: put it into a part, such as evaluations\[0\].input of perplexity"),
        ({"digits": 5}, r"unknown field: put it into a part, such as evaluations\[0\].digits of passkey"),
        ({"lenghts": [64]}, r"unknown field: did you mean lengths\?"),
    ],
)
def test_bodies_that_make_no_sense_are_refused(body: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SweepRequest(**body)


def test_default_lengths_are_those_that_the_server_takes(checkpoints: Path) -> None:
    settings = settings_of(checkpoints / "tiny", score_tokens=200)
    models = ModelRegistry(settings)
    try:
        assert plan_of(SweepRequest(evaluations=[PART]), models, settings).parts[0].lengths == [64, 128]
    finally:
        models.close()
