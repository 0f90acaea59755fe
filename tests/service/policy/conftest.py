"""Policies of the tiny model, and a server with one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from service.models.checkpoint.fingerprint import contents
from service.models.checkpoint.loading import load
from service.settings import Settings
from tests.service.serving import serving

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


@pytest.fixture(scope="module")
def served(
    checkpoints: Path, tmp_path_factory: pytest.TempPathFactory, policy: dict[str, Any]
) -> Iterator[tuple[str, FastAPI]]:
    """A server with the operator's policy."""
    file = tmp_path_factory.mktemp("policies") / "tiny.json"
    file.write_text(json.dumps(policy))
    with serving(checkpoints, policy=file, chat_template="plain") as running:
        yield running
