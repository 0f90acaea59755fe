"""Faults that keep a server from starting: found early, one line that names the setting, exit code 1."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from tests.conftest import ROOT
from tests.forks.process import forked
from tests.service.cli.shell import ropeway
from tests.service.serving import command, serve_arguments, signalled

Damage = Callable[[Path], object]


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


def without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if "norm" not in n}, folder / "model.safetensors", {"format": "pt"})


def of_another_size(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 100}))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (cut, "its weights: "),
        (
            without_a_tensor,
            "5 tensors are not as config.json says, the first: model.layers.0.input_layernorm",
        ),
        (of_another_size, "its weights: 6 tensors are not as config.json says, the first: model.layers.0.mlp"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "its tokenizer: "),
        (lambda folder: (folder / "tokenizer.json").unlink(), "its tokenizer: "),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (lambda folder: (folder / "config.json").unlink(), "cannot be loaded: the folder has no config.json"),
    ],
    ids=[
        *("cut weights", "missing weights", "other weights", "damaged tokenizer", "no tokenizer", "damaged config"),
        "no config",
    ],
)
def test_a_damaged_model_is_named(damage: Damage, told: str, checkpoints: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(checkpoints / "tiny", folder)
    damage(folder)
    refused(["--model", str(folder)], f"error: ROPEWAY_MODEL: model '{folder}' cannot be loaded: ", told)


def test_a_model_that_cannot_be_carried_is_named(checkpoints: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bert"
    shutil.copytree(checkpoints / "tiny", folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    refused(["--model", str(folder)], f"error: ROPEWAY_MODEL: model '{folder}' cannot be")


@pytest.mark.parametrize(
    "device", ["nonsense", pytest.param("cuda", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA"))]
)
def test_a_device_that_is_not_there_is_named(device: str, checkpoints: Path) -> None:
    told = f"error: ROPEWAY_DEVICE: '{device}' cannot be used"
    refused(["--model", str(checkpoints / "tiny"), "--device", device], told)


@pytest.mark.parametrize("place", ["service.models.start.patched", "service.models.start.verify"])
def test_a_model_whose_code_fails_is_one_line(place: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, failing)
    told = "error: ROPEWAY_MODEL: model 'tiny' cannot be served: KeyError in cli/test_start.py, line "
    refused(["--model", str(checkpoints / "tiny")], told, "'rope'")


@pytest.mark.parametrize(
    ("assigned", "told"),
    [
        ("database_url=mysql://ann:tulip@h/x", "only sqlite:///PATH and postgresql://HOST/NAME are supported"),
        ("database_url=postgresql://ann:tulip@h:bad/x", "ROPEWAY_DATABASE_URL"),
        ("database_url=postgresql://ann:tulip@h:bad/x", "its port is no number"),
        ("shared_url=redis://:tulip@h:bad", "error: ROPEWAY_SHARED_URL: redis://HOST:PORT, with a port below 65536"),
        ("shared_url=redis://:tulip@h:70000", "error: ROPEWAY_SHARED_URL: redis://HOST:PORT, with a port below 65536"),
        ("shared_url=redis://[tulip", "error: ROPEWAY_SHARED_URL: redis://HOST:PORT, with a port below 65536"),
    ],
)
def test_an_impossible_url_is_refused_before_models_load_and_without_its_password(
    assigned: str, told: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.app.ModelRegistry", failing)
    result = ropeway("serve", "--model", str(checkpoints / "tiny"), "--port", "0", "--set", assigned)
    assert result.exit_code == 1
    assert told in result.stderr
    assert not {"tulip", "Traceback", "KeyError"} & set(re.findall(r"\w+", result.output))


def test_a_file_of_settings_that_is_no_text_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_bytes("ROPEWAY_HOST=é\n".encode("latin-1"))
    for words in (["serve", "--port", "0"], ["keys", "list"], ["models", "--model", "demo"]):
        result = ropeway(*words)
        assert result.exit_code == 1
        assert f"error: {tmp_path / '.env'}: not in UTF-8, at byte 14" in result.stderr
        assert "Traceback" not in result.output


def failing(*_: object) -> None:
    raise KeyError("rope")


@pytest.mark.parametrize("level", ["info", "debug"])
def test_any_other_failure_of_a_start_is_one_line(
    level: str, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The traceback is for those who ask for it."""
    monkeypatch.setattr("service.app.ModelRegistry", failing)
    arguments = ["--model", str(checkpoints / "tiny"), "--port", "0", "--set", f"log_level={level}"]
    result = ropeway("serve", *arguments, "--set", f"database_url=sqlite:///{tmp_path / 'jobs.db'}")
    assert result.exit_code == 1
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert re.search(r"error: the server cannot start: KeyError in cli/test_start\.py, line \d+: 'rope'$", line)
    assert ("Traceback" in result.output) == (level == "debug")


def test_the_failure_of_a_server_for_one_command_is_one_line(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.app.ModelRegistry", failing)
    result = ropeway("models", "--model", str(checkpoints / "tiny"))
    assert result.exit_code == 1
    assert "error: the server cannot start: KeyError in cli/test_start.py" in result.stderr
    assert "Traceback" not in result.output


def refused(arguments: list[str], *told: str) -> None:
    result = ropeway("serve", *arguments)
    assert result.exit_code == 1
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert all(words in line for words in told), line
    assert "Traceback" not in result.output


@pytest.mark.parametrize("setting", ["port", "metrics_port"])
@pytest.mark.parametrize("form", ["console", "json"])
def test_a_busy_port_is_found_before_the_model_is_looked_for(setting: str, form: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        given = ("port=0", f"{setting}={port}", f"log_format={form}", "model=/no/such/model")
        result = ropeway("serve", *(flag for pair in given for flag in ("--set", pair)))
    message = f"ROPEWAY_{setting.upper()}: cannot listen on 127.0.0.1 port {port}: Address already in use"
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert (json.loads(line)["error"] if form == "json" else line.removeprefix("error: ")) == message


def test_too_few_open_files_are_found_before_the_model_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    result = ropeway("serve", "--port", "0", "--model", "/no/such/model")
    told = "error: ROPEWAY_MAX_CONNECTIONS=1000 needs 1384 open files and the system allows 1024: set it to at most 640"
    assert (result.exit_code, result.stderr.strip()) == (1, f"{told}, or raise the limit (ulimit -Hn)")


def test_an_address_of_another_machine_is_named() -> None:
    result = ropeway("serve", "--host", "192.0.2.1", "--port", "0", "--model", "/no/such/model")
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
    assert "ROPEWAY_HOST: cannot listen on 192.0.2.1: " in result.stderr


@pytest.mark.parametrize("host", ["999.1.1.1", "a..b", "a" * 64])
def test_a_host_that_is_none_is_named(host: str) -> None:
    result = ropeway("serve", "--host", host, "--port", "0", "--model", "/no/such/model")
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
    assert f"error: ROPEWAY_HOST: cannot listen on {host}: " in result.stderr


# The hub

OFFLINE_COPY = (
    "from service.models.checkpoint.hub import *\ntry: offline_copy('some/model', 'v2')\nexcept NotOnHub as e: print(e)"
)


@contextmanager
def hub(status: int, error_code: str = "") -> Iterator[tuple[str, list[str]]]:
    """URL of a Hugging Face hub that answers everything like this, and the paths that it was asked for."""
    asked: list[str] = []

    class Answers(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.send_header("X-Error-Code", error_code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_HEAD  # noqa: N815 - the name that http.server looks for

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()


def in_a_process(code: str, endpoint: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Python code with another hub, whose address is read at import, and another cache."""
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "ROPEWAY_DEVICE": "cpu"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)


def both(endpoint: str, home: Path) -> None:
    """Commands for two models on another hub, in a fork: the libraries read the hub's address anew."""
    os.environ |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "ROPEWAY_DEVICE": "cpu"}
    importlib.reload(constants)
    for arguments in (["models", "--model", "some/model", "--json"], ["serve", "--port", "0", "--model", "no/copy"]):
        try:
            command(arguments)
        except SystemExit as end:
            print("exit code", end.code, flush=True)


@pytest.mark.slow
def test_a_hub_out_of_reach_is_asked_once_and_a_copy_on_this_machine_serves(checkpoints: Path, tmp_path: Path) -> None:
    repository = tmp_path / "hub/models--some--model"
    shutil.copytree(checkpoints / "tiny", repository / "snapshots/0123")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("0123")
    with hub(503) as (url, asked):
        assert forked(both, url, tmp_path, log=tmp_path / "log").wait() == 0
    told = (tmp_path / "log").read_text()
    listing = re.search(r"^\[$.*?^\]$", told, re.DOTALL | re.MULTILINE)
    assert listing, told
    assert [info["id"] for info in json.loads(listing[0])] == ["some/model"]
    assert re.findall(r"exit code (\d)", told) == ["0", "1"]
    assert "error: ROPEWAY_MODEL: model 'no/copy' cannot be loaded: the hub: it is no folder, " in told
    assert f"{url} is out of reach" in told
    assert [len([path for path in asked if path.startswith(name)]) for name in ("/some/model", "/no/copy")] == [1, 1]


def test_a_hub_where_nothing_listens_is_out_of_reach(tmp_path: Path) -> None:
    run = in_a_process(OFFLINE_COPY, "http://127.0.0.1:9", tmp_path)
    assert "it is no folder, http://127.0.0.1:9 is out of reach (" in run.stdout, run.stderr
    assert "and this machine has no copy" in run.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "error_code", "told"),
    [
        (404, "RepoNotFound", "the hub has no public model of this name"),
        (404, "RevisionNotFound", "it has no revision 'v2' (ROPEWAY_REVISION)"),
        (404, "EntryNotFound", "it has no config.json"),
        (403, "GatedRepo", "set HF_TOKEN"),
    ],
)
def test_what_the_hub_refuses_is_told(status: int, error_code: str, told: str, tmp_path: Path) -> None:
    with hub(status, error_code) as (url, _):
        run = in_a_process(OFFLINE_COPY, url, tmp_path)
    assert told in run.stdout, run.stderr


# Signals


@pytest.mark.parametrize(
    "place",
    [
        "service.api.http.ports:require_free",
        "service.cli.server:load_libraries",
        "service.app:create_app",
        "uvicorn:Config",
        "uvicorn:Server.run",
        "uvicorn:Server.startup",
    ],
)
def test_a_signal_during_the_start_ends_it_wherever_it_comes(place: str, checkpoints: Path, tmp_path: Path) -> None:
    arguments = serve_arguments(checkpoints / "tiny", f"database_url=sqlite:///{tmp_path / 'jobs.db'}")
    running, log = forked(signalled, place, arguments, log=tmp_path / "log"), tmp_path / "log"
    try:
        assert running.wait(60) == 0, log.read_text()
    finally:
        running.kill()
    assert "Traceback" not in log.read_text()
    assert "draining" not in log.read_text(), "it has served"
