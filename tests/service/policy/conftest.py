"""Policies of the tiny model."""

from __future__ import annotations

from typing import Any

import pytest

from service.models.checkpoint.fingerprint import contents
from service.models.checkpoint.loading import load
from service.settings import Settings

RANGES: list[dict[str, Any]] = [
    {"up_to": 64, "pe": {"method": "default"}},
    {"up_to": 128, "pe": {"method": "self_extend", "neighbor_window": 32, "group_size": 4}},
    {"up_to": 256, "pe": {"method": "yarn", "factor": 4.0}},
]
"""Three kinds of encoding, and an end."""


@pytest.fixture(scope="session")
def fingerprint(checkpoints: Any) -> str:
    """Hash of the tiny model."""
    return contents(load("tiny", checkpoints / "tiny", Settings(_env_file=None)).model)


@pytest.fixture(scope="session")
def policy(fingerprint: str) -> dict[str, Any]:
    """The fields of a policy file for the tiny model."""
    return {
        "version": 1,
        "model": "tiny",
        "fingerprint": fingerprint,
        "trained_length": 64,
        "ranges": RANGES,
        "calibration": {"id": "a" * 32, "created": "2026-11-22T10:00:00Z", "measured": {"perplexity": 12.5}},
    }
