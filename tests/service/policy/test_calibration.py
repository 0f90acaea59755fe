"""A recommendation becomes the policy of ``auto``: over HTTP for one key, in the shell as a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from service.client import Ropeway, RopewayError
from service.policy.policy import parse_policy
from tests.service.cli.shell import ropeway
from tests.service.serving import serving

PROMPT = [(7 * n) % 380 + 2 for n in range(90)]
ASKED: dict[str, Any] = {"length": 128, "windows": 2, "methods": ["default", "yarn:2"]}


@pytest.fixture(scope="module")
def server(checkpoints: Path) -> Iterator[tuple[str, FastAPI]]:
    with serving(checkpoints, api_keys="ann-key, bob-key") as running:
        yield running


def auto_of(url: str, key: str) -> dict[str, Any]:
    with Ropeway(url, api_key=key) as client:
        found: Any = client.generate(PROMPT, pe="auto", max_new_tokens=4).results[0].auto
        return dict(found.model_dump())


@pytest.mark.slow
def test_a_recommendation_becomes_the_choice_of_auto_for_one_key(server: tuple[str, FastAPI]) -> None:
    url, _ = server
    with Ropeway(url, api_key="ann-key") as ann:
        result = ann.evaluate("recommend", **ASKED)
        policy = ann.calibrate(result.id)
        assert [found.up_to for found in policy.ranges][-1] == 128
        assert policy.calibration.id == result.id
        assert policy.calibration.measured == result.words()
        chosen = auto_of(url, "ann-key")
        assert (chosen["source"], chosen["calibration"], chosen["up_to"]) == ("calibration", result.id, 128)
        assert auto_of(url, "bob-key")["source"] == "rule"
        stored = httpx.get(f"{url}/policies/tiny", headers={"x-api-key": "ann-key"}).json()
        assert stored == json.loads(policy.model_dump_json())
        with pytest.raises(RopewayError) as refused:
            ann.generate(PROMPT, pe="auto", max_new_tokens=100)
        assert "128" in str(refused.value)
        ann.forget_policy("tiny")
        assert auto_of(url, "ann-key")["source"] == "rule"
        with pytest.raises(RopewayError, match="has no policy") as missing:
            ann.forget_policy("tiny")
        assert missing.value.status == 404


@pytest.mark.slow
def test_results_of_others_and_without_a_choice_are_refused(server: tuple[str, FastAPI]) -> None:
    url, _ = server
    with Ropeway(url, api_key="ann-key") as ann, Ropeway(url, api_key="bob-key") as bob:
        result = ann.evaluate("recommend", **ASKED)
        with pytest.raises(RopewayError, match="no such result"):
            bob.calibrate(result.id)
        with pytest.raises(RopewayError, match="no such result: a whole id has 32 characters"):
            ann.calibrate(result.id[:12])
        plain = ann.perplexity(methods=["default"], lengths=[64], max_tokens=200)
        with pytest.raises(RopewayError, match="perplexity names no encodings by length") as refused:
            ann.calibrate(plain.id)
        assert (refused.value.status, refused.value.param) == (400, "result")


@pytest.mark.slow
def test_the_shell_saves_a_policy_that_a_server_starts_with(
    server: tuple[str, FastAPI], checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROPEWAY_API_KEY", "ann-key")
    file = tmp_path / "policy.json"
    options = ["--length", "128", "--windows", "2", "--pe", "default", "--pe", "yarn:2", "--policy", str(file)]
    shown = ropeway("recommend", *options, "--server", server[0])
    assert shown.exit_code == 0, shown.output
    policy = parse_policy(json.loads(file.read_text(encoding="utf-8")))
    assert policy.trained_length == 64
    with serving(checkpoints, policy=file) as (url, _):
        answer = httpx.post(f"{url}/generate", json={"prompt": PROMPT, "pe": "auto", "max_new_tokens": 4}, timeout=60)
        assert answer.json()["results"][0]["auto"]["source"] == "file"
        with Ropeway(url) as client:
            kept = client.calibrate(client.evaluate("recommend", **ASKED).id)
        assert kept.notes[-1] == "`auto` follows the operator's policy file for tiny, and not this policy."


def test_other_commands_save_no_policy(tmp_path: Path) -> None:
    shown = ropeway("passkey", "--policy", str(tmp_path / "a.json"))
    assert (shown.exit_code, "no option --policy" in shown.output) == (2, True)
    assert "--policy" not in ropeway("sweep", "--help").stdout
    assert "--policy" in ropeway("recommend", "--help").stdout


@pytest.mark.parametrize("name", ["Org%2FModel", "Org/Model"])
def test_the_name_of_a_model_may_have_a_slash(server: tuple[str, FastAPI], name: str) -> None:
    """As those of the hub have. This server has another model, and says so."""
    for method in ("GET", "DELETE"):
        answer = httpx.request(method, f"{server[0]}/policies/{name}", headers={"Authorization": "Bearer ann-key"})
        assert answer.status_code == 404
        assert "'Org/Model'" in answer.json()["error"]["message"]
        assert "route" not in answer.json()["error"]["message"]


def test_a_key_without_a_policy(server: tuple[str, FastAPI]) -> None:
    error = httpx.get(f"{server[0]}/policies/tiny", headers={"Authorization": "Bearer bob-key"}).json()["error"]
    assert error["message"] == "this API key has no policy for 'tiny' from a recommendation"
