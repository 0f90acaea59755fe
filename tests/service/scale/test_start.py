"""The start of `ropeway serve` with replicas: signals and a taken port. Tests are skipped where Ray is absent."""

from __future__ import annotations

import socket
from importlib.util import find_spec
from pathlib import Path

import pytest

from service.api.http import ports
from service.scale import private_names
from tests.forks.process import forked
from tests.service.serving import command, ends, serve_arguments, signalled

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
        arguments = [*serve_arguments(checkpoints / "tiny", *settings), "--port", str(port)]
        running = forked(without_a_trial_of_the_port, arguments, log=log)
        try:
            assert running.wait(120) == 1
        finally:
            running.kill()
    own = [line for line in log.read_text().splitlines() if not line.startswith("(")]
    assert own[-1].endswith(f"Failed to bind to address '127.0.0.1:{port}'.")
    assert not [line for line in own if "Traceback" in line]
