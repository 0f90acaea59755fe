"""Encodings that are measured beyond the reach of their parameters: one caution, and none for the model's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from patches import RopeGeometry, parse
from service.evaluation.catalogue import EVALUATIONS, plan_of
from service.evaluation.unit import evaluate
from service.models.registry import ModelRegistry
from tests.service.conftest import TEXT
from tests.service.evaluation.prompting import finish, registry, settings_of
from tests.service.results import result_of

SHORT = [{"method": "linear", "factor": 2}, {"method": "self_extend", "group_size": 2, "neighbor_window": 16}]
FAR = ["default", "ntk:4", "streaming", "dynamic:2", "rerope"]
ENDS = "self_extend(group_size=2, neighbor_window=16) at 112"
"""16 + 2 x (64 - 16) tokens, by the formula of docs/methods.md at 64 trained tokens."""
BODIES: dict[str, dict[str, Any]] = {
    "perplexity": {"input": TEXT, "lengths": [64, 128, 130]},
    "long_perplexity": {"input": TEXT, "lengths": [130], "alpha": 0.1, "beta": -20.0},
    "probe": {"input": TEXT, "lengths": [64], "distances": [16, 113], "samples": 1, "segment_of": "document"},
    "passkey": {"lengths": [400], "depths": [0.5], "samples": 1, "digits": 1, "max_new_tokens": 4},
    "ruler": {"lengths": [450], "tasks": ["niah_single_1"], "samples": 1},
    "sweep": {"lengths": [130], "evaluations": [{"evaluation": "perplexity", "input": TEXT}] * 2},
}


@pytest.fixture(scope="module")
def models(checkpoints: Path) -> Iterator[ModelRegistry]:
    yield from registry(checkpoints / "tiny")


def measured(models: ModelRegistry, evaluation: str, methods: list[Any], **fields: Any) -> Any:
    body = {**BODIES[evaluation], "methods": methods, **fields}
    return finish(evaluate(plan_of(EVALUATIONS[evaluation].request(**body), models, settings_of(Path("tiny")))))


@pytest.mark.parametrize("evaluation", BODIES)
def test_one_sentence_has_every_encoding_that_ends_before_the_longest_pass(
    models: ModelRegistry, evaluation: str
) -> None:
    result = measured(models, evaluation, ["default", *SHORT])
    longest = max(BODIES[evaluation]["lengths"][-1], 130)
    sentence = f"These encodings end before {longest} tokens by their parameters: linear(factor=2) at 128 and {ENDS}."
    assert result.cautions().count(sentence) == 1
    assert result.words().count(sentence) == 1


def test_a_length_within_the_reach_has_no_caution(models: ModelRegistry) -> None:
    assert measured(models, "perplexity", SHORT[:1], lengths=[64, 128]).cautions() == []
    (caution,) = measured(models, "perplexity", SHORT, lengths=[128]).cautions()
    assert "linear" not in caution


def test_the_own_encoding_and_endless_ones_have_no_reach(models: ModelRegistry) -> None:
    """The base of `dynamic` follows the length, whatever its factor."""
    result = measured(models, "perplexity", FAR, lengths=[200])
    assert {method.label: method.reach for method in result.methods} == {
        "default": None,
        "ntk(factor=4)": 256,
        "streaming": None,
        "dynamic(factor=2)": None,
        "rerope": None,
    }
    assert result.cautions() == []


def test_equal_encodings_with_two_labels_are_measured_once(models: ModelRegistry) -> None:
    bases = [{"method": "linear", "factor": 2}, {"method": "linear", "factor": 2, "rope_theta": None}]
    asked = [{"method": "self_extend", "base": base} for base in bases]
    assert len(measured(models, "perplexity", asked, lengths=[64]).methods) == 1


def test_encodings_that_extend_nothing_have_no_reach(models: ModelRegistry) -> None:
    result = measured(models, "perplexity", ["resonance", "clipped_rope", "linear:1"], lengths=[200])
    assert [method.reach for method in result.methods] == [None, None, None]


def test_an_encoding_over_an_endless_schedule_has_no_reach() -> None:
    geometry = RopeGeometry(16, 16, 1e4, 64, 64, 4)
    assert parse("self_extend:base=dynamic").reached(geometry) is None
    assert parse("self_extend:base=linear:2").reached(geometry) == 8 * (128 - 16) + 16
    assert parse("resonance:base=dynamic").reached(geometry) is None


def test_many_encodings_are_one_short_sentence() -> None:
    result = result_of({f"linear(factor={n})": [7.0] for n in range(2, 60)}, [99_999])
    for n, method in enumerate(result.methods, 2):
        method.reach = 256 * n
    (caution,) = result.cautions()
    assert caution.endswith("linear(factor=6) at 1,536 and 53 more.")
    assert len(caution) < 250
