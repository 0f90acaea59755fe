"""A log that nobody reads, or that cannot be written, holds up neither requests nor the end of a server."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import httpx
import pytest

from service import log_writer
from service.log_writer import LogWriter
from tests.forks.parent import SERVERS
from tests.forks.process import fork
from tests.service.serving import command, ends, serve_arguments, wait_for

pytestmark = pytest.mark.skipif(not hasattr(fcntl, "F_SETPIPE_SZ"), reason="the size of a pipe is fixed on this system")

SMALLEST = 4096
"""Bytes of the smallest pipe."""
Pipe = tuple[int, int]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, SMALLEST)
    yield read, write
    for end in (read, write):
        os.close(end)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of lines that the log says were dropped."""
    found: list[int] = []

    class Log:
        def warning(self, event: str, *, lines: int) -> None:
            assert event == "log_lines_dropped"
            found.append(lines)

    monkeypatch.setattr(log_writer, "log", Log())
    return found


def read_until(descriptor: int, end: str) -> str:
    text = b""
    while not text.decode().endswith(end):
        text += os.read(descriptor, SMALLEST)
    return text.decode()


def test_lines_come_in_order_and_the_end_waits_for_them(pipe: Pipe) -> None:
    writer = LogWriter(pipe[1])
    for number in range(100):
        writer.write(f"{number}\n")
    writer.finish()
    assert os.read(pipe[0], SMALLEST).decode().splitlines() == [str(number) for number in range(100)]


def test_lines_that_nobody_reads_are_dropped_and_counted(
    pipe: Pipe, noted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_writer, "MOST_WAITING", 100)
    writer = LogWriter(pipe[1])
    lines = [f"{number:0999}\n" for number in range(1000)]
    for line in lines:
        writer.write(line)
    reader = threading.Thread(target=read_until, args=(pipe[0], "last\n"))
    reader.start()
    wait_for(lambda: noted)
    writer.write("last\n")
    reader.join(15)
    assert not reader.is_alive()
    # A pipe of 4,096 bytes takes four of these lines, the thread has one in its hands, and a hundred wait.
    assert 890 <= sum(noted) <= 900


def test_a_reader_that_is_gone_raises_nothing(noted: list[int]) -> None:
    read, write = os.pipe()
    writer = LogWriter(write)
    os.close(read)
    for _ in range(3):
        writer.write("line\n")
    writer.finish()
    read, again = os.pipe()
    os.dup2(again, write)  # as when a disk has room again
    writer.write("line\n")
    writer.finish()
    assert noted == [3]
    for end in (read, write, again):
        os.close(end)


@pytest.mark.parametrize("reader", ["stopped", "gone"])
def test_a_server_goes_on_without_its_log(
    checkpoints: Path, tmp_path: Path, pipe: Pipe, reader: Literal["stopped", "gone"]
) -> None:
    read, write = pipe
    arguments = serve_arguments(checkpoints / "tiny", f"database_url=sqlite:///{tmp_path / 'jobs.db'}")
    with open(os.devnull, "rb") as nothing:
        running = fork(SERVERS, command, (arguments,), tmp_path, (nothing.fileno(), write, write))
    try:
        text = ""
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", text)):
            text += os.read(read, SMALLEST).decode()
        if reader == "gone":
            with open(os.devnull, "rb") as nothing:
                os.dup2(nothing.fileno(), read)
        with httpx.Client(base_url=found[0], timeout=60) as client:
            for _ in range(100):
                assert client.get("/models").status_code == 200
            job = client.post("/jobs", json={"evaluation": "perplexity", "input": "text " * 99, "lengths": [64]}).json()
            wait_for(lambda: client.get(f"/jobs/{job['id']}").json()["state"] == "done", 60)
        running.send_signal(signal.SIGTERM)
        assert ends(running, 15) == 0
    finally:
        running.kill()
        running.wait()
