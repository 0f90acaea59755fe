"""``auto`` in evaluations: every length has its own encoding, and jobs share outcomes."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.service.policy.asking import post, refusal
from tests.service.policy.conftest import RANGES
from tests.service.serving import wait_for


class TestEvaluations:
    BODY = {"input": [n % 380 + 2 for n in range(400)], "lengths": [32, 64, 96, 200], "model": "tiny"}  # noqa: RUF012

    @pytest.mark.parametrize("protocol", ["curve", "disjoint"])
    def test_every_length_has_its_own_encoding(self, served: tuple[str, FastAPI], protocol: str) -> None:
        fixed = [found["pe"] for found in RANGES]
        body = self.BODY | {"protocol": protocol, "methods": ["auto", *fixed]}
        auto, *others = post(served[0], "/perplexity", **body)["methods"]
        assert (auto["label"], auto["pe"]["method"]) == ("auto", "auto")
        assert auto["pe"]["ranges"] == RANGES
        assert auto["pe"]["origin"]["calibration"] == "a" * 32
        for position, which in enumerate([0, 0, 1, 2]):
            length = self.BODY["lengths"][position]
            means = [method["lengths"][position]["nll_mean"] for method in (auto, others[which])]
            assert means[0] == pytest.approx(means[1], abs=1e-5), "up to the chunks of the pass"
            assert auto["frequency_hashes"][str(length)] == others[which]["frequency_hashes"][str(length)]
        (again,) = post(served[0], "/perplexity", **body | {"methods": [auto["pe"]]})["methods"]
        assert again == auto

    def test_a_reserved_length_beyond_the_last_range_is_refused(self, served: tuple[str, FastAPI]) -> None:
        error = refusal(served[0], "/perplexity", **self.BODY | {"lengths": [300], "methods": "auto"})
        assert error["param"] == "methods.0"
        assert "beyond its last range, which ends at 256" in error["message"]

    def test_every_range_is_checked_before_anything_is_measured(self, served: tuple[str, FastAPI]) -> None:
        for pe, reason in (("learned", "method: learned is for models"), ("alibi", "'tiny-alibi' answers under alibi")):
            auto = {"method": "auto", "ranges": [{"up_to": 40, "pe": pe}, {"up_to": None, "pe": "default"}]}
            for body in ({"lengths": [64]}, {"lengths": [64], "background": True}):
                error = refusal(served[0], "/perplexity", **self.BODY | body | {"methods": ["default", auto]})
                assert error["param"] == "methods.1"
                assert f"ranges.0.pe: {reason}" in error["message"]

    def test_two_of_one_name_are_refused(self, served: tuple[str, FastAPI]) -> None:
        """Tables and pictures have the label alone, and that of ``auto`` is one word whatever its ranges are."""
        other = {"method": "auto", "ranges": [{"up_to": None, "pe": "yarn:8"}]}
        for path, param in (("/perplexity", "methods.2"), ("/sweep", "methods")):
            body = {"model": "tiny", "lengths": [64], "methods": ["auto", "yarn:4", other]}
            error = refusal(served[0], path, **body)
            assert error["param"] == param
            assert "a second encoding of the name auto" in error["message"]
        again = post(served[0], "/perplexity", **self.BODY | {"lengths": [64], "methods": [other, other]})
        assert [method["label"] for method in again["methods"]] == ["auto"]

    def test_passkey(self, served: tuple[str, FastAPI]) -> None:
        body = {"model": "tiny", "lengths": [220, 250], "methods": ["auto", "yarn:4"], "depths": [0.5]}
        auto, fixed = post(served[0], "/passkey", **body)["methods"]
        assert auto["cells"] == fixed["cells"], "yarn:4 is the encoding of the last range"

    def test_sweep(self, served: tuple[str, FastAPI]) -> None:
        body = {"model": "tiny", "lengths": [64, 200], "methods": ["auto", "yarn:4"]}
        parts = [{"evaluation": "perplexity", "input": self.BODY["input"], "protocol": "disjoint"}]
        found = post(served[0], "/sweep", **body, evaluations=parts)
        by_label = {method["label"]: method for method in found["methods"]}
        assert {"auto", "yarn(factor=4)"} <= set(by_label)
        at_target = [method["judgements"][0]["value"] for method in (by_label["auto"], by_label["yarn(factor=4)"])]
        assert at_target[0] == at_target[1], "yarn:4 is the encoding of the last range"
        within = {method["label"]: method["lengths"][0] for method in found["evaluations"][0]["methods"]}
        assert within["auto"] == within["default"], "within the trained length auto is the model's own encoding"

    def test_a_job_stores_the_ranges_and_shares_outcomes(self, served: tuple[str, FastAPI]) -> None:
        url = served[0]
        body = {"evaluation": "perplexity", **self.BODY, "protocol": "disjoint"}
        fixed = done(url, httpx.post(f"{url}/jobs", json=body | {"methods": [RANGES[0]["pe"]]}).json())
        assert fixed["units_reused"] == 0
        job = done(url, httpx.post(f"{url}/jobs", json=body | {"methods": ["auto"]}).json())
        assert job["request"]["methods"][0]["ranges"] == RANGES
        assert (job["units_total"], job["units_reused"]) == (4, 2), "two of its lengths have the native encoding"
        text = httpx.get(f"{url}/metrics").text
        assert 'pe_method="auto"' not in text


def done(url: str, job: dict[str, Any]) -> dict[str, Any]:
    """The job at its end."""
    found: dict[str, Any] = {}

    def ended() -> bool:
        found.update(httpx.get(f"{url}/jobs/{job['id']}").json())
        return found["state"] in ("done", "failed")

    wait_for(ended, 60)
    assert found["state"] == "done", found
    return found
