"""A log that nobody reads, or that cannot be written, holds up neither requests nor the end of a server."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
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


class Reports:
    """A log of one writer. Its only lines are those about dropped ones."""

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer

    def error(self, event: str, *, lines: int) -> None:
        self._writer.write(f"{event} {lines}\n")


def dropped(lines: list[str]) -> int:
    """Lines that a log says were dropped."""
    return sum(int(line.split()[1]) for line in lines if line.startswith("log_lines_dropped "))


def test_lines_come_in_order_and_the_end_waits_for_them(pipe: Pipe) -> None:
    writer = LogWriter(pipe[1])
    for number in range(100):
        writer.write(f"{number}\n")
    writer.finish()
    assert os.read(pipe[0], SMALLEST).decode().splitlines() == [str(number) for number in range(100)]


def numbers(text: str) -> list[int]:
    """Those of whole lines."""
    return [int(line) for line in text.rpartition("\n")[0].splitlines() if line.isdecimal()]


def test_lines_that_nobody_reads_are_dropped_and_counted(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "MOST_WAITING", 100)
    writer = LogWriter(pipe[1])
    monkeypatch.setattr(log_writer, "log", Reports(writer))
    for number in range(1000):
        writer.write(f"{number:0999}\n")
    text = ""
    while len(numbers(text)) + dropped(text.rpartition("\n")[0].splitlines()) < 1000:  # the first report may be early
        text += os.read(pipe[0], SMALLEST).decode()
    writer.write("last\n")
    while not text.endswith("last\n"):
        text += os.read(pipe[0], SMALLEST).decode()
    lines = text.splitlines()
    written = numbers(text)
    assert written == sorted(written)
    assert dropped(lines) == 1000 - len(written) >= 890, "a pipe has four of these lines, and a hundred wait"


def test_a_reader_that_is_gone_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    writer = LogWriter(write)
    monkeypatch.setattr(log_writer, "log", Reports(writer))
    os.close(read)
    for _ in range(3):
        writer.write("line\n")
    writer.finish()
    read, again = os.pipe()
    os.dup2(again, write)  # as when a disk has room again
    writer.write("line\n")
    writer.finish()
    assert os.read(read, SMALLEST).decode() == "line\nlog_lines_dropped 3\n"
    for end in (read, write, again):
        os.close(end)


def test_a_line_that_a_full_disk_has_cut_stays_alone(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    write, room = os.write, [3, 0]

    def full(descriptor: int, data: bytes) -> int:
        if not room:
            return write(descriptor, data)
        if not (most := room.pop(0)):
            raise OSError(errno.ENOSPC, "full")
        return write(descriptor, data[:most])

    writer = LogWriter(pipe[1])
    monkeypatch.setattr(log_writer, "log", Reports(writer))
    monkeypatch.setattr(os, "write", full)
    writer.write("first\n")
    writer.write("second\n")
    writer.finish()
    assert os.read(pipe[0], SMALLEST).decode() == "fir\nsecond\nlog_lines_dropped 1\n"


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
