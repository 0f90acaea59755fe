"""Small probes of the tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.evaluation.probe.plan import ProbePlan, plan_of
from service.evaluation.probe.request import ProbeRequest
from service.models.registry import ModelRegistry
from service.settings import Settings
from tests.service.conftest import TEXT

DOCUMENTS = [TEXT[:3000], TEXT[4000:8000]]
METHODS = [{"method": "default"}, {"method": "yarn", "factor": 4}, {"method": "self_extend", "group_size": 4}]
SMALL: dict[str, Any] = {
    "input": DOCUMENTS,
    "methods": METHODS,
    "lengths": [40, 128],
    "queries": 20,
    "distances": [12, 50],
    "samples": 3,
    "segment": 6,
}


def settings_of(model: str, **others: Any) -> Settings:
    return Settings(model=model, dtype="float32", device="cpu", cache_tokens=4096, _env_file=None, **others)


@pytest.fixture(scope="module")
def tiny(checkpoints: Path) -> Iterator[ModelRegistry]:
    models = ModelRegistry(settings_of(str(checkpoints / "tiny")))
    yield models
    models.close()


def planned(models: ModelRegistry, **body: Any) -> ProbePlan:
    settings = settings_of("demo", max_scored_tokens=100_000, score_chunk=32, max_lengths=8)
    return plan_of(ProbeRequest(**{**SMALL, **body}), models, settings)
