"""The tiny model of evaluations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from service.models.registry import ModelRegistry
from tests.service.evaluation.prompting import registry


@pytest.fixture(scope="session")
def models(checkpoints: Path) -> Iterator[ModelRegistry]:
    yield from registry(checkpoints / "tiny")
