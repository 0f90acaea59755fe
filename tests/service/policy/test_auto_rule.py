"""``auto`` without the operator's policy: the rule, calibrations of tenants, and a database out of reach."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from service.api.http.access import ApiKeys
from service.api.http.key_file import hash_of
from service.jobs.database.opening import StoreOutOfReach
from service.policy.policy import Policy, parse_policy
from tests.service.policy.asking import NEW, post, prompt, result
from tests.service.serving import serving


@pytest.fixture(scope="module")
def plain(checkpoints: Path) -> Iterator[tuple[str, FastAPI]]:
    """A server without a policy, and with two keys."""
    with serving(checkpoints, api_keys="ann-key, bob-key") as running:
        yield running


ANN, BOB = {"x-api-key": "ann-key"}, {"x-api-key": "bob-key"}


class TestTheRule:
    def test_within_the_trained_length_the_tokens_are_native(self, plain: tuple[str, FastAPI]) -> None:
        for reserved in (12, 40, 64):
            found, native = (result(plain[0], reserved, pe, ANN) for pe in ("auto", "default"))
            assert (found["token_ids"], found["pe"]) == (native["token_ids"], native["pe"])
            origin = {"source": "rule", "calibration": None, "created": None}
            assert found["auto"] == {**origin, "above": 0, "up_to": 64}

    def test_beyond_it_dynamic_yarn_scales_by_the_reserved_length(self, plain: tuple[str, FastAPI]) -> None:
        found = result(plain[0], 256, "auto", ANN)
        assert (found["pe"]["method"], found["pe"]["reserved_length"]) == ("dynamic_yarn", 256)
        assert (found["auto"]["above"], found["auto"]["up_to"]) == (64, None)
        fixed = result(plain[0], 256, "yarn:4", ANN)
        assert found["pe"]["frequency_hash"] == fixed["pe"]["frequency_hash"]
        again = result(plain[0], 256, found["pe"], ANN)
        assert (again["pe"], again["token_ids"]) == (found["pe"], found["token_ids"])


def test_a_tenants_calibration_is_its_own(plain: tuple[str, FastAPI], policy: dict[str, Any]) -> None:
    """A request under another key does not see it, and the newest one counts."""
    url, app = plain
    ann = ApiKeys([hash_of("ann-key")], None).tenant_of(["ann-key"])
    assert ann is not None
    assert result(url, 200, "auto", ANN)["auto"]["source"] == "rule"
    app.state.jobs.put_policy(ann, Policy.model_validate(policy))
    found = result(url, 200, "auto", ANN)
    assert (found["auto"]["source"], found["auto"]["calibration"]) == ("calibration", "a" * 32)
    assert found["pe"]["method"] == "yarn"
    assert result(url, 200, "auto", BOB)["auto"]["source"] == "rule"
    newer = policy | {"ranges": [{"up_to": None, "pe": {"method": "linear", "factor": 4.0}}]}
    app.state.jobs.put_policy(ann, Policy.model_validate(newer))
    assert result(url, 200, "auto", ANN)["pe"]["method"] == "linear"
    models = [httpx.get(f"{url}/models", headers=key).json()["models"][0] for key in (ANN, BOB)]
    assert [model["auto"]["source"] for model in models] == ["calibration", "rule"]


def test_a_database_out_of_reach_is_said(
    plain: tuple[str, FastAPI], monkeypatch: pytest.MonkeyPatch, policy: dict[str, Any]
) -> None:
    """The rule never takes the place of a policy that cannot be read."""
    url, app = plain

    def fails(tenant: str, fingerprint: str) -> None:
        raise StoreOutOfReach("locked")

    monkeypatch.setattr(app.state.jobs, "policy_of", fails)
    body = {"prompt": prompt(20), "max_new_tokens": NEW}
    answer = httpx.post(f"{url}/generate", json=body | {"pe": "auto"}, headers=ANN)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "jobs_out_of_reach")
    assert post(url, headers=ANN, **body)["results"], "other encodings need no database"
    assert httpx.get(f"{url}/models", headers=ANN).json()["models"][0]["auto"] is None

    def of_another_version(tenant: str, fingerprint: str) -> Policy:
        return parse_policy(policy | {"version": 2})

    monkeypatch.setattr(app.state.jobs, "policy_of", of_another_version)
    answer = httpx.post(f"{url}/generate", json=body | {"pe": "auto"}, headers=ANN)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        "pe: the stored policy of 'tiny' cannot be read, calibrate again: version: must be 1, not 2"
    )
