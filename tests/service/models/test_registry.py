"""Limits of models that are served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from service.models.registry import ModelRegistry
from service.settings import Settings


@pytest.mark.parametrize(
    ("asked", "most", "bound"),
    [
        ({}, 512, "ROPEWAY_CACHE_TOKENS"),
        ({"max_length": 500}, 500, "ROPEWAY_MAX_LENGTH"),
        ({"max_length": 512}, 512, "ROPEWAY_CACHE_TOKENS and ROPEWAY_MAX_LENGTH"),
    ],
)
def test_the_setting_that_bounds_a_request_is_known(
    asked: dict[str, Any], most: int, bound: str, checkpoints: Path
) -> None:
    settings = Settings(_env_file=None, device="cpu", model=str(checkpoints / "tiny"), cache_tokens=512, **asked)
    registry = ModelRegistry(settings)
    try:
        assert (registry.default.max_length, registry.default.bound) == (most, bound)
    finally:
        registry.close()
