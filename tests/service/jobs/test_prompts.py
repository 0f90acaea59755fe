"""Prompts that an evaluation wrote: with the results of a job where they are asked for, and nowhere else."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.evaluation.catalogue import EVALUATIONS
from service.evaluation.results import EvaluationResult
from tests.service.demo import small_demo
from tests.service.evaluation.prompting import BOS, TOKENIZER
from tests.service.jobs.test_routes import ended, submitted
from tests.service.serving import serving, wait_for

GRID: dict[str, Any] = {"lengths": [300, 400], "samples": 2, "input": None, "methods": ["default", "yarn:2"]}
NEEDLE = {"depths": [0.5], "max_new_tokens": 2}
PASSKEY: dict[str, Any] = {"evaluation": "passkey", **GRID, "depths": [0.0, 1.0], "digits": 3}
BODIES: dict[str, dict[str, Any]] = {
    "passkey": PASSKEY,
    "needle": {"evaluation": "needle", **GRID, **NEEDLE, "input": "The harbor was quiet. Nobody rowed there. " * 9},
    "ruler": {
        **{"evaluation": "ruler", **GRID, "input": "The harbor was quiet. Nobody rowed there. " * 9},
        **{"tasks": ["niah_single_1", "niah_single_2", "vt", "fwe"], "lengths": [1200], "max_new_tokens": 2},
    },
}
SWEEP = {
    **{"evaluation": "sweep", "methods": ["yarn:2"], "lengths": [256, 300]},
    "evaluations": [
        {"evaluation": "perplexity", "input": "The harbor was quiet. Nobody rowed there. " * 99},
        {"evaluation": "passkey", "depths": [0.5], "samples": 1, "digits": 3},
        {"evaluation": "passkey", "depths": [0.5], "samples": 1, "digits": 4},
    ],
}
ASKED = {"include_text": "true"}


def done(client: httpx.Client, body: dict[str, Any]) -> str:
    answer = client.post("/jobs", json={name: value for name, value in body.items() if value is not None})
    assert answer.status_code == 202, answer.text
    job = ended(client, answer.json()["id"])
    assert job["state"] == "done", job
    return str(job["id"])


def read(client: httpx.Client, job_id: str, file: str, **query: str) -> Any:
    answer = client.get(f"/jobs/{job_id}/{file}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def result_of(told: dict[str, Any]) -> EvaluationResult:
    return EVALUATIONS[told["evaluation"]].result.model_validate(told)


@pytest.mark.parametrize("name", BODIES)
def test_every_output_has_its_prompt(client: httpx.Client, name: str) -> None:
    job_id = done(client, BODIES[name])
    plain, told = read(client, job_id, "results.json"), read(client, job_id, "results.json", **ASKED)
    outputs = result_of(told).outputs()
    assert outputs
    for output in (output.model_dump() for output in outputs):
        ids = TOKENIZER(output["prompt"], add_special_tokens=False)["input_ids"]
        assert len([BOS, *ids]) == output["prompt_tokens"]
        if name != "needle" and output["name"].split(",")[0] not in ("vt", "fwe"):
            assert all(string in output["prompt"] for string in output["expected"])
    assert '"prompt":' not in json.dumps(plain), "results stay small"
    assert [one.model_copy(update={"prompt": None}) for one in outputs] == result_of(plain).outputs()
    units = read(client, job_id, "units.json", **ASKED)["units"]
    asked = [unit["prompt"] for unit in sorted(units, key=lambda unit: unit["number"]) if "prompt" in unit]
    assert sorted(asked) == sorted(str(output.prompt) for output in outputs)
    assert all("prompt" not in unit for unit in read(client, job_id, "units.json")["units"])
    assert "position" not in units[0]


def test_the_parts_of_a_sweep_have_their_own(tmp_path: Path) -> None:
    with serving(small_demo(tmp_path)) as (url, _), httpx.Client(base_url=url, timeout=60) as client:
        job_id = done(client, SWEEP)
        result = result_of(read(client, job_id, "results.json", **ASKED))
        units = read(client, job_id, "units.json", **ASKED)["units"]
    outputs = [output.model_dump() for output in result.outputs()]
    assert len(outputs) == 8
    assert all(f"The pass key is {output['expected'][0]}." in output["prompt"] for output in outputs)
    assert sorted(unit["prompt"] for unit in units if "prompt" in unit) == sorted(one["prompt"] for one in outputs)


def test_a_unit_has_the_prompt_of_its_name_and_length(client: httpx.Client) -> None:
    job_id = done(client, PASSKEY)
    result = read(client, job_id, "results.json", **ASKED)
    prompts = {
        (cell["length"], output["name"]): output["prompt"]
        for cell in result["methods"][0]["cells"]
        for output in cell["outputs"]
    }
    for unit in read(client, job_id, "units.json", **ASKED)["units"]:
        assert unit["prompt"] == prompts[unit["length"], unit["name"]]


def test_a_report_has_each_prompt_once(client: httpx.Client) -> None:
    job_id = done(client, PASSKEY)
    outputs = result_of(read(client, job_id, "results.json", **ASKED)).outputs()
    whole = client.get(f"/jobs/{job_id}/report.html", params=ASKED).text
    small = client.get(f"/jobs/{job_id}/report.html").text
    assert len(outputs) == 16
    for prompt in {str(output.prompt) for output in outputs}:
        assert whole.count(html.escape(prompt)) == 1
        assert html.escape(prompt) not in small
    assert "The prompts are not in this report" in small
    assert "The prompts are not in this report" not in whole


def test_a_partial_result_has_those_of_its_methods(client: httpx.Client) -> None:
    body = PASSKEY | {"lengths": [300], "samples": 24, "reuse": False}
    answer = client.post("/jobs", json={name: value for name, value in body.items() if value is not None})
    job_id = answer.json()["id"]
    wait_for(lambda: client.get(f"/jobs/{job_id}").json()["units_done"] > 48, 60)
    client.delete(f"/jobs/{job_id}")
    told = read(client, job_id, "results.json", **ASKED)
    assert told["partial"]["units_done"] < 96
    outputs = result_of(told).outputs()
    assert len(outputs) == 48
    assert all(output.prompt for output in outputs)


def test_an_evaluation_of_texts_has_no_prompts(client: httpx.Client) -> None:
    job_id = ended(client, submitted(client)["id"])["id"]
    for file in ("results.json", "units.json"):
        answer = client.get(f"/jobs/{job_id}/{file}", params=ASKED)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "include_text")
        assert "perplexity writes no prompts" in answer.json()["error"]["message"]


def test_prompts_of_another_plan_are_not_shown(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = done(client, PASSKEY)
    with monkeypatch.context() as patch:
        patch.setattr("service.jobs.address.code_version", lambda: "other code")
        for file in ("results.json", "units.json"):
            answer = client.get(f"/jobs/{job_id}/{file}", params=ASKED)
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "other_setup")
        report = client.get(f"/jobs/{job_id}/report.html", params=ASKED)
        assert "not in this report: the job is of other code" in report.raise_for_status().text
    assert client.get(f"/jobs/{job_id}/results.json", params=ASKED).status_code == 200


def test_prompts_beyond_an_answer_are_refused(checkpoints: Path) -> None:
    with serving(checkpoints, max_answer_bytes=3000) as (url, _), httpx.Client(base_url=url, timeout=60) as client:
        answer = client.get(f"/jobs/{done(client, PASSKEY)}/results.json", params=ASKED)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "answer_too_large")
