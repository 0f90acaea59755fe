"""A full disk under standard output or a file: one line on stderr, exit code 1. Old files stay whole."""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from service.cli import output
from service.cli.shared import files
from service.cli.shared.files import save, write
from service.docs import pages
from tests.conftest import ROOT
from tests.forks.parent import SERVERS
from tests.forks.process import fork
from tests.service.cli.shell import ropeway, succeeded
from tests.service.serving import command

FULL = Path("/dev/full")
NO_SPACE = "error: stdout: No space left on device"

on_a_full_disk = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


def ended(arguments: list[str], stdout: int, log: Path) -> tuple[int, str]:
    """Exit code and stderr of `ropeway` with this standard output."""
    with log.open("wb") as errors, open(os.devnull, "rb") as nothing:
        streams = (nothing.fileno(), stdout, errors.fileno())
        code = fork(SERVERS, command, (arguments,), ROOT, streams).wait(60)
    return code, log.read_text().strip()


@pytest.mark.parametrize(
    ("encoding", "errors", "written"),
    [
        ("latin-1", "strict", rb"caf\u8bad \u201cno\u201d"),
        ("cp932", "strict", b"caf" + "训 “no”".encode("cp932", "backslashreplace")),
        ("ascii", "surrogateescape", rb"caf\u8bad \u201cno\u201d"),
        ("utf-8", "strict", "caf训 “no”".encode()),
        ("ascii", "replace", b"caf? ?no?"),
    ],
)
def test_text_that_the_encoding_lacks_is_escaped(
    encoding: str, errors: str, written: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding=encoding, errors=errors))
    output.guard()
    print("caf训 “no”", end="", flush=True)
    assert raw.getvalue() == written


@on_a_full_disk
@pytest.mark.parametrize("arguments", [["methods", "yarn"], ["--help"]])
def test_under_stdout_is_one_line(arguments: list[str], tmp_path: Path) -> None:
    with FULL.open("wb") as full:
        assert ended(arguments, full.fileno(), tmp_path / "log") == (1, NO_SPACE)


def test_a_closed_pipe_is_quiet(tmp_path: Path) -> None:
    read, pipe = os.pipe()
    os.close(read)
    try:
        assert ended(["--help"], pipe, tmp_path / "log") == (1, "")
    finally:
        os.close(pipe)


def test_a_closed_stdout_fails_at_the_first_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout", None)
    output.guard()
    print("text")
    for attempt in (sys.stdout.flush, lambda: print("more")):
        with pytest.raises(SystemExit, match="1"):
            attempt()
    sys.stdout.close()
    assert capsys.readouterr().err == "error: stdout: Bad file descriptor\n"


def test_a_key_that_cannot_be_printed_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    succeeded("keys", "new", "ann", "--file", str(file))
    before = file.read_text()
    monkeypatch.setattr("typer.echo", Mock(side_effect=SystemExit(1)))
    assert ropeway("keys", "new", "bob", "--file", str(file)).exit_code == 1
    assert file.read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", fail)


def test_a_file_of_keys_stays_whole(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    file = tmp_path / "keys"
    succeeded("keys", "new", "ann", "--file", str(file))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    before = file.read_text()
    request.getfixturevalue("full")
    for arguments in (["new", "bob"], ["revoke", "ann"]):
        result = ropeway("keys", *arguments, "--file", str(file))
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr == f"error: {file}: No space left on device\n"
    assert file.read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]


@pytest.mark.usefixtures("full")
def test_an_output_stays_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.html"
    file.write_text("old")
    for path in (file, tmp_path / "new.html"):
        with pytest.raises(Exception, match="1"):
            save(path, b"new")
        assert f"error: {path}: No space left on device" in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("report.html", "old")]


@pytest.mark.usefixtures("full")
def test_generated_pages_are_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in (pages.methods, pages.export, pages.primer):
        monkeypatch.setattr(part, "files", lambda: [("a.md", "text")])
    result = ropeway("methods", "--docs", str(tmp_path))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"error: {tmp_path}: No space left on device\n"


class TestWrite:
    def test_permissions_and_links_stay(self, tmp_path: Path) -> None:
        old, link, dangling = tmp_path / "old", tmp_path / "link", tmp_path / "dangling"
        old.touch()
        old.chmod(0o604)
        link.symlink_to("old")
        dangling.symlink_to("made")
        inode = old.stat().st_ino
        for path in (link, dangling):
            write(path, b"new")
            assert path.is_symlink()
        assert (old.read_text(), stat.S_IMODE(old.stat().st_mode)) == ("new", 0o604)
        assert old.stat().st_ino != inode, "replaced as a whole"
        umask = os.umask(0o027)
        os.umask(umask)
        assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o666 & ~umask

    def test_an_open_file_and_a_pipe_are_written_to(self, tmp_path: Path) -> None:
        link, pipe, log = tmp_path / "link", tmp_path / "pipe", tmp_path / "log"
        os.mkfifo(pipe)
        reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        write(pipe, b"through")
        assert os.read(reading, 16) == b"through"
        os.close(reading)
        with log.open("w+b") as opened:
            link.symlink_to(f"/dev/fd/{opened.fileno()}")
            for path in (link, Path(f"/dev/fd/{opened.fileno()}")):
                write(path, b"text")
                opened.seek(0)
                assert opened.read() == b"text"

    @pytest.mark.parametrize("number", files.IN_PLACE)
    def test_a_file_that_cannot_be_replaced_is_written_to(
        self, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As in another's folder, and where a container has the file alone."""

        def refuse(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr("os.replace", refuse)
        file = tmp_path / "file"
        file.write_text("old")
        write(file, b"new")
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "new")]
        with pytest.raises(OSError, match=os.strerror(number)):
            write(tmp_path / "absent", b"new")
