"""Variables that look like settings: a slip stops the start, and others are named in the log."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from service import logs
from service.cli.serve import _warn
from service.settings import Settings
from tests.service.cli.shell import ropeway


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    logs.configure("warning")


def test_a_slip_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROPEWAY_MAX_QEUE", "5")
    result = ropeway("serve", "--model", "/no/such/model")
    assert result.exit_code == 1
    assert "ROPEWAY_MAX_QEUE: no setting; is it ROPEWAY_MAX_QUEUE?" in result.stderr


def test_a_slip_in_the_file_stops_it_too() -> None:
    Path(".env").write_text("ROPEWAY_PORT=0\nROPEWAY_DEVCE=cpu\n")
    result = ropeway("serve", "--model", "/no/such/model")
    assert result.exit_code == 1
    assert "ROPEWAY_DEVCE: no setting; is it ROPEWAY_DEVICE?" in result.stderr


def test_variables_of_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes adds such variables for a service with the name ropeway."""
    for name in ("ROPEWAY_SERVICE_HOST", "ROPEWAY_PORT_8000_TCP_PORT", "ROPEWAY_URL", "HOME_OF_ROPEWAY"):
        monkeypatch.setenv(name, "1")
    with capture_logs() as lines:
        _warn(Settings())
    assert [(line["event"], line["names"]) for line in lines] == [
        ("unknown_settings", ["ROPEWAY_PORT_8000_TCP_PORT", "ROPEWAY_SERVICE_HOST"])
    ]


@pytest.mark.parametrize("keys", [None, "secret"])
def test_the_key_of_a_client_protects_nothing(keys: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROPEWAY_API_KEY", "secret")
    with capture_logs() as lines:
        _warn(Settings(api_keys=keys) if keys else Settings())
    assert [line["event"] for line in lines] == ([] if keys else ["no_api_keys"])
