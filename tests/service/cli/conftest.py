"""The model that the commands serve."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def tiny(checkpoints: Path) -> Path:
    return checkpoints / "tiny"
