"""Evaluations refuse fields without effect, and errors name the field that was sent."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

NEEDLE = {"needle": "The magic word is zebra.", "lengths": [256], "samples": 1, "depths": [0.5]}
UNCOMMON = {"tasks": ["cwe"], "cwe_frequency": 3, "cwe_uncommon_frequency": 30}
NO_DOCUMENTS = "without effect: niah_single_1 use no documents"


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("/recommend", {"length": 200, "lengths": [128, 256]}, "lengths", "must be at most length (200), not 256"),
        ("/recommend", {"lengths": [10, 256]}, "lengths", "must be at least 64, not 10"),
        ("/ruler", {"tasks": ["niah_single_1"], "input": "Some words."}, "input", NO_DOCUMENTS),
        ("/ruler", {"tasks": ["niah_single_1"], "names": ["mine"]}, "names", NO_DOCUMENTS),
        ("/ruler", {"tasks": ["niah_single_1"], "max_tokens": 9}, "max_tokens", NO_DOCUMENTS),
        ("/ruler", UNCOMMON, "cwe_uncommon_frequency", "must be below cwe_frequency (3), not 30"),
        ("/ruler", {"cwe_frequency": 3}, "cwe_uncommon_frequency", "must be below cwe_frequency (3)"),
        ("/sweep", {"methods": ["yarn"], "factors": [2, 5000]}, "factors.1", "must be at most 4096, not 5000.0"),
        ("/sweep", {"methods": ["yarn"], "factors": [0.5]}, "factors.0", "must be at least 1, not 0.5"),
        ("/sweep", {"methods": ["yarn"], "factors": [5000]}, "factors.0", "must be at most 4096, not 5000.0"),
        ("/needle", NEEDLE, "expected", "required: the needle has none of the default strings"),
        ("/passkey", {"methods": None}, "methods", "must be an encoding or a list of them, not null"),
        ("/sweep", {"methods": 4, "factors": [2]}, "methods", "must be an encoding or a list of them, not 4"),
        (
            "/sweep",
            {"evaluations": [None]},
            "evaluations.0",
            "the name of an evaluation, or an object, not null",
        ),
        ("/passkey", {"lengths": [256], "max_new_tokens": 1}, "max_new_tokens", "the tokens of a key"),
    ],
)
def test_the_field_is_named(client: httpx.Client, path: str, body: dict[str, Any], param: str, says: str) -> None:
    reply = client.post(path, json={"methods": ["default"], **body})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(f"{param}: ")
    assert says in error["message"]
    assert ", not an object" not in error["message"]
    assert ", not a list" not in error["message"]


@pytest.mark.parametrize(("value", "shown"), [(None, "null"), ([True], "a list"), (5, "5"), ({"a": 1}, "an object")])
def test_an_evaluation_is_named_by_text(client: httpx.Client, value: Any, shown: str) -> None:
    error = client.post("/jobs", json={"evaluation": value, "input": "a"}).json()["error"]
    assert error["param"] == "evaluation"
    assert error["message"].startswith("evaluation: must be one of perplexity, long_perplexity, ")
    assert error["message"].endswith(f", recommend, not {shown}")
    error = client.post("/jobs", json={"evaluation": "perplexty", "input": "a"}).json()["error"]
    assert error["message"] == "evaluation: unknown evaluation 'perplexty': did you mean perplexity?"


def test_another_needle_comes_with_its_answer(client: httpx.Client) -> None:
    for needle in ("EAT A SANDWICH in the park.", "On a sunny day."):
        assert client.post("/needle", json={**NEEDLE, "needle": needle, "methods": ["default"]}).status_code == 200
    asked = {**NEEDLE, "methods": ["default"], "expected": ["zebra"], "question": "The word is", "max_new_tokens": 4}
    assert client.post("/needle", json=asked).status_code == 200


def test_the_model_of_an_evaluator_is_named(client: httpx.Client) -> None:
    body = {"lengths": [128], "methods": ["default"], "evaluator": {"model": "foo"}}
    reply = client.post("/long_perplexity", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (404, "evaluator.model")
    assert error["message"].startswith("evaluator.model: unknown model 'foo'")
    part = {"evaluation": "long_perplexity", "evaluator": {"model": "foo"}}
    error = client.post("/sweep", json={"methods": ["default"], "evaluations": [part]}).json()["error"]
    assert error["param"] == "evaluations.0.evaluator.model"


def test_null_is_absent(client: httpx.Client) -> None:
    asked = {"tasks": ["vt"], "samples": 1, "lengths": [512], "methods": ["default"], "max_new_tokens": 4}
    assert client.post("/ruler", json={**asked, "max_tokens": None, "names": None}).status_code == 200


def test_a_parameter_of_a_query_is_named(client: httpx.Client) -> None:
    error = client.get("/methods/dynamic/frequencies", params={"reserved_length": 4096}).json()["error"]
    assert error["param"] == "reserved_length"


@pytest.mark.parametrize(("lengths", "target"), [([128], 256), ([128, 256], 256), ([64, 128], 200)])
def test_a_target_beside_lengths_is_measured(client: httpx.Client, lengths: list[int], target: int) -> None:
    asked = {"methods": ["default", "yarn:4"], "lengths": lengths, "length": target, "windows": 2}
    reply = client.post("/recommend", json=asked)
    assert reply.status_code == 200, reply.text
    result = reply.json()
    assert (result["target_length"], result["lengths"]) == (target, sorted({*lengths, target}))
