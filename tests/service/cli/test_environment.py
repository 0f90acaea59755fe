"""Variables that look like settings: a slip stops the start, and others are named in the log."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from service import logs
from service.cli.serve import _warn
from service.env_file import UnreadableFile, load
from service.environment import misspelt
from service.scale.cluster import settings_on_node
from service.scale.options import InvalidScale
from service.settings import Settings
from tests.service.cli.shell import ropeway
from tests.service.unprivileged import unprivileged


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    logs.configure("warning")


def test_a_slip_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROPEWAY_MAX_QEUE", "5")
    result = ropeway("serve", "--model", "/no/such/model")
    assert result.exit_code == 1
    assert "ROPEWAY_MAX_QEUE: no setting; is it ROPEWAY_MAX_QUEUE?" in result.stderr


SLIPS = {
    **{"ROPEWAY_PROT": "PORT", "ROPEWAY_MODLE": "MODEL", "ROPEWAY_DEIVCE": "DEVICE", "ROPEWAY_HOSTS": "HOST"},
    **{"ROPEWAY_OST": "HOST", "ROPEWAY_API_KYES": "API_KEYS", "ROPEWAY_DTIPE": "DTYPE"},
}


@pytest.mark.parametrize("name", SLIPS)
def test_short_names_have_slips_too(name: str) -> None:
    assert misspelt([name]) == [f"{name}: no setting; is it ROPEWAY_{SLIPS[name]}?"]


def test_a_node_of_a_cluster_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROPEWAY_API_KYES", "secret")
    with pytest.raises(InvalidScale, match="is it ROPEWAY_API_KEYS"):
        settings_on_node({})


def test_an_empty_variable_overrides_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    Path(".env").write_text("ROPEWAY_API_KEYS=secret\nROPEWAY_THREADS=3\n")
    assert (Settings().threads, Settings().has_keys) == (3, True)
    monkeypatch.setenv("ROPEWAY_THREADS", "")
    assert (Settings().threads, Settings().has_keys) == (None, True)


def test_an_empty_file_of_keys_leaves_no_server_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROPEWAY_API_KEYS_FILE", "")
    result = ropeway("serve", "--model", "/no/such/model")
    assert result.exit_code == 1
    assert "ROPEWAY_API_KEYS_FILE: empty: name a file" in result.stderr


@pytest.mark.parametrize("keys", [",", ",,,", " ", " , "])
def test_keys_without_a_key_leave_no_server_open(keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROPEWAY_API_KEYS", keys)
    result = ropeway("serve", "--model", "/no/such/model")
    assert result.exit_code == 1
    assert "ROPEWAY_API_KEYS: no key in it" in result.stderr
    monkeypatch.setenv("ROPEWAY_API_KEYS", "")
    assert not Settings().has_keys, "an empty variable is as if it were not set"


def test_a_slip_in_the_file_stops_it_too() -> None:
    Path(".env").write_text("ROPEWAY_PORT=0\nROPEWAY_DEVCE=cpu\n")
    result = ropeway("serve", "--model", "/no/such/model")
    assert result.exit_code == 1
    assert "ROPEWAY_DEVCE: no setting; is it ROPEWAY_DEVICE?" in result.stderr


def test_variables_of_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes adds such variables for a service with a name like ropeway-server."""
    for name in ("ROPEWAY_SERVER_SERVICE_HOST", "ROPEWAY_SERVER_PORT", "ROPEWAY_URL", "HOME_OF_ROPEWAY"):
        monkeypatch.setenv(name, "1")
    with capture_logs() as lines:
        _warn(Settings())
    assert [(line["event"], line["names"]) for line in lines] == [
        ("unknown_settings", ["ROPEWAY_SERVER_PORT", "ROPEWAY_SERVER_SERVICE_HOST"])
    ]


@pytest.mark.parametrize("keys", [None, "secret"])
@pytest.mark.parametrize("in_file", [True, False])
def test_the_key_of_a_client_protects_nothing(keys: str | None, in_file: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if in_file:
        Path(".env").write_text("ROPEWAY_API_KEY=secret\n")
    else:
        monkeypatch.setenv("ROPEWAY_API_KEY", "secret")
    with capture_logs() as lines:
        _warn(Settings(api_keys=keys) if keys else Settings())
    assert [line["event"] for line in lines] == ([] if keys else ["no_api_keys"])


OF_LIBRARIES = {"HF_TOKEN": "hf_tulip", "HF_ENDPOINT": "http://127.0.0.1:9", "OMP_NUM_THREADS": "1", "ROPEWAY_URL": "u"}


def test_libraries_and_the_client_read_the_file_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"HF_TOKEN": "hf_rose"})
    Path(".env").write_text("\n".join(f"{name}={value}" for name, value in OF_LIBRARIES.items()) + "\nEMPTY\n")
    load()
    assert os.environ == OF_LIBRARIES | {"HF_TOKEN": "hf_rose"}, "the shell's value stays"


def test_settings_of_the_file_stay_out_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes would inherit the keys."""
    monkeypatch.setattr(os, "environ", {})
    Path(".env").write_text("ROPEWAY_API_KEYS=tulip\nropeway_port=0\nROPEWAY_UNKNOWN=1\n")
    load()
    assert os.environ == {}


def test_a_closed_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with unprivileged() as folder:
        monkeypatch.chdir(folder)
        Path(".env").touch(mode=0)
        with pytest.raises(UnreadableFile, match=rf"{folder}/\.env: Permission denied"):
            load()
    monkeypatch.undo()


def run(program: str) -> subprocess.CompletedProcess[str]:
    """``program`` here, in an environment without the variables of the file."""
    clean = {name: value for name, value in os.environ.items() if name not in OF_LIBRARIES}
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=clean | {"PYTHONPATH": str(root)}, capture_output=True, text=True, check=False)


def test_the_command_reads_the_file_before_its_libraries() -> None:
    Path(".env").write_text("HF_ENDPOINT=http://127.0.0.1:9\nHF_HUB_OFFLINE=1\n")
    program = (
        "import sys\nfrom service.cli import app\nassert 'huggingface_hub' not in sys.modules\n"
        "try: app(['--version'])\nexcept SystemExit: pass\n"
        "from huggingface_hub import constants\nprint(constants.ENDPOINT, constants.HF_HUB_OFFLINE)"
    )
    assert run(program).stdout.splitlines()[-1] == "http://127.0.0.1:9 True"


def test_the_command_refuses_a_file_that_is_no_text(tmp_path: Path) -> None:
    Path(".env").write_bytes("HF_TOKEN=é".encode("latin-1"))
    ended = run("from service.cli import app; app(['methods'])")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == f"error: {tmp_path / '.env'}: not in UTF-8, at byte 10\n"
