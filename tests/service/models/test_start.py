"""Models as every rank starts them."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import CapturingLogger

from service.models import start
from service.models.start import started
from service.settings import Settings
from tests.service.conftest import tiny_checkpoint

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


def test_one_warning_names_the_entries_that_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stray = {"finetuned": True, "attn_factor": 1.0, "type": "linear"}
    for name, parameters in (("plain", YARN), ("stray", YARN | stray)):
        tiny_checkpoint(tmp_path / name, rope_parameters=parameters)
        log = CapturingLogger()
        monkeypatch.setattr(start, "log", log)
        (context,) = next(started(Settings(_env_file=None, model=str(tmp_path / name), device="cpu")))
        with context as served:
            assert served.patch.describe("default", 64)["factor"] == 4.0
        ignored = [call.kwargs["entries"] for call in log.calls if call.args == ("rope_parameters_ignored",)]
        assert ignored == ([sorted(stray)] if name == "stray" else [])
