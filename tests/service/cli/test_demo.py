"""Failures of ``ropeway demo``, and the processes that it starts; tests/service/docs/test_readme.py runs it whole."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from service.cli import demo
from service.evaluation import documents
from tests.conftest import ROOT
from tests.service.cli.shell import ropeway


@contextlib.contextmanager
def process(code: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that has printed a line, so that it is past its first statements."""
    child = subprocess.Popen([sys.executable, "-c", f"import signal, sys, time\n{code}"], stdout=subprocess.PIPE)
    try:
        assert child.stdout
        child.stdout.readline()
        yield child
    finally:
        child.kill()
        child.communicate()


def run(command: list[str], environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=170)


CLEAN = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nprint(flush=True)\ntime.sleep(60)"
PLAIN = "print(flush=True)\ntime.sleep(60)"
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(flush=True)\ntime.sleep(60)"


class TestDemo:
    def test_answers_have_no_blank_rows(self) -> None:
        assert demo.one_line(" mural.\n\n\n  Then\tthe") == "mural. Then the"

    def test_the_prompt_ends_inside_a_sentence_of_the_default_document(self) -> None:
        prompt = demo._prompt()
        assert prompt.startswith("The party from Uppercross")
        assert prompt.endswith(" the")
        assert 1000 < len(prompt) <= demo.PROMPT_CHARS
        assert prompt in documents.persuasion()

    def test_a_server_that_cannot_start_is_a_clear_failure(self, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "service.cli", "demo", "--output", str(tmp_path)]
        ran = run(command, {**os.environ, "ROPEWAY_PAGE_SIZE": "x"})
        assert ran.returncode == 1
        assert "error: the server ended with exit code 1 while starting" in ran.stderr
        assert "Traceback" not in ran.stderr
        assert "ROPEWAY_PAGE_SIZE" in (tmp_path / "server.log").read_text()

    def test_a_failure_stops_the_server(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        started: list[subprocess.Popen[bytes]] = []

        def wait_until_ready(process: subprocess.Popen[bytes], _: httpx.Client) -> None:
            started.append(process)
            raise demo.DemoFailed("not ready")

        monkeypatch.setattr(demo, "_wait_until_ready", wait_until_ready)
        result = ropeway("demo", "--output", str(tmp_path))
        assert result.exit_code == 1
        assert "error: not ready" in result.stderr
        assert started[0].poll() == -signal.SIGKILL

    def test_stop_accepts_a_clean_exit(self) -> None:
        with process(CLEAN) as child:
            demo.stop(child)
            assert child.returncode == 0

    def test_stop_refuses_another_exit_code(self) -> None:
        with process(PLAIN) as child, pytest.raises(demo.DemoFailed, match="exit code -15"):
            demo.stop(child)

    def test_stop_does_not_wait_for_ever(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(demo, "STOP_S", 0.2)
        with process(DEAF) as child, pytest.raises(demo.DemoFailed, match="did not stop within"):
            demo.stop(child)
