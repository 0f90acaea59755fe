"""An address changes with everything that an outcome depends on, and with nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from patches import parse
from service.evaluation.catalogue import plan_of
from service.evaluation.perplexity.request import PerplexityRequest
from service.evaluation.unit import Unit
from service.jobs import address
from service.jobs.address import Addresses
from service.models.registry import ModelRegistry
from service.settings import Settings
from tests.service.jobs.bench import body


@pytest.fixture
def key(models: ModelRegistry, job_settings: Settings) -> Any:
    """Address of the first unit of a request."""

    def of(tenant: str = "anna", job_id: str | None = None, **fields: Any) -> str:
        return Addresses(models).key(unit_of(models, job_settings, **fields), tenant, job_id)

    return of


def unit_of(models: ModelRegistry, settings: Settings, **fields: Any) -> Unit:
    return plan_of(PerplexityRequest.model_validate(body(**fields)), models, settings).units[0]


def test_the_same_work_has_the_same_address(key: Any) -> None:
    linear = {"method": "linear", "factor": 2.0}
    assert key() == key()
    assert key(methods=[linear]) == key(methods=[linear | {"attention_temperature": None}])
    assert key() == key(model="tiny") == key(stream=True) == key(methods=[{"method": "default"}])
    assert key() == key(names=["a.txt", "b.txt"])
    assert len(key()) == 64


@pytest.mark.parametrize(
    "fields",
    [
        {"tenant": "berta"},
        {"job_id": "a"},
        {"input": [[9, 8, 7, *range(2, 80)]]},
        {"lengths": [63]},
        {"methods": [{"method": "linear", "factor": 2.0}]},
        {"methods": [{"method": "default", "attention_temperature": 1.1}]},
        {"methods": [{"method": "alibi"}]},
        {"bos": "never"},
        {"protocol": "sliding"},
    ],
    ids=str,
)
def test_what_a_request_says_is_in_it(key: Any, fields: dict[str, Any]) -> None:
    assert key() != key(**fields)


def test_a_reserved_length_counts_where_it_matters(models: ModelRegistry, job_settings: Settings) -> None:
    addresses = Addresses(models)
    for method, matters in (({"method": "dynamic", "factor": 2.0}, True), ({"method": "linear", "factor": 2.0}, False)):
        unit = unit_of(models, job_settings, methods=[method])
        longer = replace(unit, length=unit.length * 4)
        assert (addresses.key(unit, "anna") != addresses.key(longer, "anna")) is matters


def test_code_numbers_and_chunks_are_in_it(
    models: ModelRegistry, job_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = unit_of(models, job_settings)
    before = Addresses(models).key(unit, "anna")
    small = unit_of(models, job_settings.model_copy(update={"score_chunk": 32}))
    assert Addresses(models).key(small, "anna") != before
    with monkeypatch.context() as patch:
        patch.setattr(address, "code_version", lambda: "other")
        assert Addresses(models).key(unit, "anna") != before
    with monkeypatch.context() as patch:
        patch.setattr(models.default, "fingerprint", "other")
        assert Addresses(models).key(unit, "anna") != before
    assert Addresses(models).key(unit, "anna") == before


def test_a_running_model_keeps_its_addresses(models: ModelRegistry, job_settings: Settings) -> None:
    """transformers sets and removes keys of the configuration during a forward."""
    unit = unit_of(models, job_settings)
    before = Addresses(models).key(unit, "anna")
    config = unit.subject.patch.model.config
    with pytest.MonkeyPatch.context() as context:
        context.setattr(config, "is_causal", False, raising=False)
        assert Addresses(models).key(unit, "anna") == before


def test_methods_that_mean_the_same_share_an_address(models: ModelRegistry, job_settings: Settings) -> None:
    """``default`` on a checkpoint that ships a scaling is that scaling by another name."""
    unit = unit_of(models, job_settings)
    patch = unit.subject.patch
    linear = parse({"method": "linear", "factor": 2.0})
    with pytest.MonkeyPatch.context() as context:
        context.setattr(patch, "geometry", replace(patch.geometry, native=linear))
        renamed = replace(unit, subject=unit.subject._replace(method=parse({"method": "default"})))
        plain = replace(unit, subject=unit.subject._replace(method=linear))
        assert Addresses(models).key(renamed, "anna") == Addresses(models).key(plain, "anna")
