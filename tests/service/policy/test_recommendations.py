"""Recommendations as policies: those that ended early, and lengths beyond the server's requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from service.api.encodings.policies import _policy, _shown
from service.errors import ApiError
from service.evaluation.results import Partial
from service.jobs.storage.results import written_and_packed
from service.models.registry import ModelRegistry
from service.policy.policy import parse_policy
from tests.service.evaluation.prompting import registry
from tests.service.evaluation.recommend.made_up import GOOD, LENGTH, answered, planned

MADE_UP = {"others": (3.0, 0.1), GOOD: (2.0, 0.8)}


@pytest.fixture(scope="module")
def models(checkpoints: Path) -> Iterator[ModelRegistry]:
    yield from registry(checkpoints / "tiny")


def test_a_result_that_ended_early_is_a_policy_on_request_only(models: ModelRegistry) -> None:
    result, _ = answered(planned(models), MADE_UP, (2.0, 0.9))
    whole = _policy(written_and_packed(result)[1], False, models)
    result.end_early(Partial(units_done=2, units_total=9, missing={"yarn": 7}, lacks=["rounds"]))
    packed = written_and_packed(result)[1]
    with pytest.raises(ApiError, match=r"ended early \(2 of 9 units .*\): resume it, or send partial true") as refused:
        _policy(packed, False, models)
    assert (refused.value.status, refused.value.param) == (409, "result")
    assert _policy(packed, True, models).ranges == whole.ranges


def test_a_length_beyond_the_servers_requests_is_said(models: ModelRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` up to 256 tokens became the choice of a server that refused requests of more than 200."""
    says = "Requests to generate have at most 200 tokens here; 256 need a larger ROPEWAY_MAX_LENGTH or cache."
    served = models.default
    for most, notes in ((LENGTH, []), (200, [says])):
        monkeypatch.setattr(served, "max_length", most)
        result, _ = answered(planned(models), MADE_UP, (2.0, 0.9))
        assert [line for line in result.words() if "ROPEWAY_MAX_LENGTH" in line] == notes
        shown = json.loads(bytes(_shown(result.policy(datetime.now(UTC)), served).body))
        (text,) = [line for line in result.words() if line.startswith("The answer holds for the text of ")]
        assert shown["notes"] == [text, *notes]
        assert parse_policy(shown).notes == (text, *notes), "the answer is a policy file"
