"""The start of `ropeway serve` with replicas: signals, a taken port, faults. Tests are skipped where Ray is absent."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from service.api.http import ports
from service.scale import private_names
from tests.forks.process import forked
from tests.service.scale.test_replicas import replica_processes
from tests.service.serving import command, ends, serve_arguments, signalled, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: the extra `scale` has it"),
]


def signalled_beside_ray(place: str, arguments: list[str]) -> None:
    """The same where ``place`` may be Ray's own, which reads its environment once."""
    private_names.prepare_private_cluster()
    private_names.prepare_private_cluster = lambda: None
    signalled(place, arguments)


@pytest.mark.parametrize(
    "place",
    [
        "service.api.http.ports:require_free",
        "ray:init",
        "ray._private.services:start_raylet",
        "ray.serve:start",
        "ray.serve._private.api:ServeControllerClient",
        "service.scale.local:bound",
        "ray.serve:run_many",
        "ray.serve:status",
    ],
)
def test_a_signal_during_the_start_ends_it_wherever_it_comes(place: str, checkpoints: Path, tmp_path: Path) -> None:
    settings = ("replicas=2", f"database_url=sqlite:///{tmp_path / 'jobs.db'}")
    arguments, log = serve_arguments(checkpoints / "tiny", *settings), tmp_path / "log"
    running = forked(signalled_beside_ray, place, arguments, log=log)
    try:
        assert ends(running, 120) == 0, log.read_text()
    finally:
        running.kill()
    assert "Traceback" not in log.read_text()
    assert "SIGTERM" not in log.read_text(), "Ray has traced it"
    assert "replicas_ready" not in log.read_text()


def without_a_trial_of_the_port(arguments: list[str]) -> None:
    """`ropeway`, for a fork, whose port gets taken after the trial."""
    ports.require_free = lambda *_: None  # type: ignore[assignment]
    command(arguments)


def test_a_port_that_is_taken_meanwhile_is_named_in_the_last_line(checkpoints: Path, tmp_path: Path) -> None:
    settings, log = ("replicas=2", f"database_url=sqlite:///{tmp_path / 'jobs.db'}"), tmp_path / "log"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = serve_arguments(checkpoints / "tiny", *settings, port=port)
        running = forked(without_a_trial_of_the_port, arguments, log=log)
        try:
            assert running.wait(120) == 1
        finally:
            running.kill()
    own = [line for line in log.read_text().splitlines() if not line.startswith("(")]
    assert own[-1].endswith(f"Failed to bind to address '127.0.0.1:{port}'.")
    assert not [line for line in own if "Traceback" in line]


def refusals(model: Path, folder: Path, *arguments: str) -> list[str]:
    """The last line of the single server of ``model``, and that of replicas. Both end with exit code 1."""
    database, found = f"database_url=sqlite:///{folder / 'jobs.db'}", []
    for count in (1, 2):
        log = folder / f"log{count}"
        given = [*serve_arguments(model, database), "--replicas", str(count), *arguments]
        running = forked(command, given, log=log)
        try:
            assert ends(running, 120) == 1, log.read_text()
        finally:
            running.kill()
        found.append(log.read_text().splitlines()[-1])
    return found


def damaged(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')


@pytest.mark.parametrize(
    ("damage", "told"), [(shutil.rmtree, "this folder does not exist, "), (damaged, "its config.json: ")]
)
def test_replicas_refuse_a_model_in_the_words_of_the_single_server(
    damage: Callable[[Path], object], told: str, checkpoints: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(checkpoints / "tiny", model)
    damage(model)
    alone, replicas = refusals(model, tmp_path)
    assert replicas == alone
    assert replicas.startswith(f"error: ROPEWAY_MODEL: model '{model}' cannot be loaded: {told}")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--policy", "/no/policy.json"), "ROPEWAY_POLICY: "),
        (("--set", "api_keys_file=/no/keys"), "the file of API keys cannot be read: "),
        (
            ("--set", "database_url=sqlite:////no/jobs.db"),
            "the database of jobs sqlite:////no/jobs.db cannot be ",
        ),
    ],
    ids=["policy", "keys", "database"],
)
def test_replicas_refuse_a_setting_in_the_words_of_the_single_server(
    arguments: tuple[str, str], told: str, checkpoints: Path, tmp_path: Path
) -> None:
    alone, replicas = refusals(checkpoints / "tiny", tmp_path, *arguments)
    assert replicas == alone
    assert replicas.startswith(f"error: {told}")


def test_a_log_as_json_ends_with_the_reason(tmp_path: Path) -> None:
    lines = refusals(tmp_path / "none", tmp_path, "--set", "log_format=json")
    alone, replicas = ({name: json.loads(line)[name] for name in ("event", "error", "level")} for line in lines)
    assert replicas == alone
    assert replicas["error"].startswith("ROPEWAY_MODEL: ")


def test_replicas_that_are_killed_as_they_start_are_a_clear_error(checkpoints: Path, tmp_path: Path) -> None:
    settings, log = ("replicas=2", f"database_url=sqlite:///{tmp_path / 'jobs.db'}"), tmp_path / "log"
    running = forked(command, serve_arguments(checkpoints / "tiny", *settings), log=log)

    def has_ended() -> bool:
        if (ended := running.poll()) is None:
            with suppress(psutil.Error):  # processes may end as they are listed
                for process in replica_processes(psutil.Process(running.pid)):
                    process.kill()
        return ended is not None

    try:
        wait_for(has_ended, 120)
        assert running.wait(0) == 1, log.read_text()
    finally:
        running.kill()
    last = log.read_text().splitlines()[-1]
    opening, _, reason = last.partition(" say more: ")
    assert opening == "error: the replicas did not start, and their lines above"
    assert reason
