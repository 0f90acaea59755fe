"""The log of a server: one form for every line of every library, and nothing twice."""

from __future__ import annotations

import json
import logging
import sys
import threading
import warnings
from pathlib import Path
from typing import Any, Literal, TextIO

import httpx
import pytest
import structlog

from service import logs
from tests.forks.process import forked
from tests.service.serving import ends, process

LIBRARIES = (
    "transformers.modeling_utils",
    "huggingface_hub.utils",
    "torch",
    "torch._dynamo",
    "alembic.runtime.migration",
    "uvicorn.error",
    "httpx",
    "dill",
    "follows",
)


class Follows(logging.Handler):
    """Writes to the error stream of the moment, as torch's handler does from 2.14 on."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        print("beside the log:", record.getMessage(), file=self.stream)


def write(form: Literal["json", "console"]) -> None:
    """Lines of every library, of Python's warnings, of a thread and of a process that end with an error."""
    logging.getLogger("follows").addHandler(Follows())
    logs.configure("info", form, libraries=True)
    for name in LIBRARIES:
        logging.getLogger(name).warning("\x1b[1mfrom %s\x1b[0m", name, extra={"color_message": "\x1b[36m"})
        logging.getLogger(name).info("chatter")
    warnings.warn("of python", stacklevel=1)
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    raise RuntimeError("at the end")


def written(form: str, folder: Path) -> list[str]:
    assert forked(write, form, log=folder / form).wait(60) == 1
    return (folder / form).read_text().splitlines()


@pytest.mark.slow
def test_every_writer_gets_the_form_of_the_log_and_is_heard_once(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [json.loads(line) for line in written("json", tmp_path)]
    assert not any("\x1b" in str(line) or "color_message" in line for line in lines)
    events = [line["event"] for line in lines if line["event"] != "chatter"]
    warned = next(event for event in events if "of python" in event)
    assert events == [*(f"from {name}" for name in LIBRARIES), warned, "uncaught", "uncaught"]
    assert sum(line["event"] == "chatter" for line in lines) == 1, "uvicorn's alone"
    assert ["ZeroDivisionError" in lines[-2]["exception"], "at the end" in lines[-1]["exception"]] == [True, True]


@pytest.mark.slow
def test_lines_for_people_are_not_doubled_either(tmp_path: Path) -> None:
    text = "\n".join(written("console", tmp_path))
    assert [text.count(f"from {name}") for name in LIBRARIES] == [1 if name != "torch" else 2 for name in LIBRARIES]
    assert "\x1b" not in text


@pytest.mark.slow
def test_a_server_writes_nothing_but_json(checkpoints: Path, tmp_path: Path) -> None:
    database = f"database_url=sqlite:///{tmp_path / 'jobs.db'}"
    for start in range(2):  # the second one finds its tables
        log = tmp_path / f"log{start}"
        with process(checkpoints / "tiny", "log_format=json", database, "cache_tokens=2048", log=log) as (server, url):
            httpx.post(f"{url}/generate", json={"prompt": "a", "max_new_tokens": 2}, timeout=60).raise_for_status()
            assert httpx.post(f"{url}/generate", content=b"{").status_code == 400
            server.terminate()
            assert ends(server, 15) == 0
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert not any("\x1b" in str(line) or "color_message" in line for line in lines)
        assert sum(line["event"] == "request" for line in lines) == 2
        assert not [line for line in lines if line["event"].startswith(("Context impl", "Will assume", "Running upg"))]


HOSTILE = "/\x1b[31mred\x07\x00\x9b2J\u202e\ud800"


def test_nothing_of_a_client_controls_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    before = structlog.get_config()
    try:
        logs.configure("info")
        log = structlog.get_logger()
        log.info(f"odd\r {HOSTILE}", path=HOSTILE, words=f"two {HOSTILE}", several=[HOSTILE], whole="/generate")
        try:
            raise ValueError(HOSTILE)
        except ValueError as error:
            log.error("failed", exc_info=error)
    finally:
        structlog.configure(**before)
    written = capsys.readouterr().err
    assert not [each for each in written if not each.isprintable() and each != "\n"]
    escaped = r"/\x1b[31mred\x07\x00\x9b2J\u202e\ud800"
    assert written.count(escaped) == 5
    assert f" path={escaped} " in written
    assert f" words='two {escaped}'" in written
    assert f"ValueError: {escaped}\n" in written
    assert r" odd\r " in written
    assert "whole=/generate" in written
