"""Outputs that cannot be written are refused before the work."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.cli.shell import ropeway
from tests.service.unprivileged import unprivileged


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recommend", "--report", "."], "--report: '.' is a folder, and the output is a file"),
        (["recommend", "--policy", "."], "--policy: '.' is a folder"),
        (["recommend", "--plot", "dir.png"], "--plot: 'dir.png' is a folder"),
        (["recommend", "--report", "no/a.html"], "--report: there is no folder 'no'"),
        (["recommend", "--report", "a" * 300], "a: File name too long"),
        (
            ["recommend", "--plot", "same.html", "--report", "./same.html"],
            "--report: 'same.html' is the file of --plot already",
        ),
        (
            ["recommend", "--plot", "same.png", "--plot", "link/same.png"],
            "'link/same.png' is the file of --plot already",
        ),
        (["report", "0123", "-o", "dir.png"], "--output: 'dir.png' is a folder"),
        (["report", "0123", "--output", "no/a.html"], "--output: there is no folder 'no'"),
        (["jobs", "results", "0123", "--parquet", "dir.png"], "--parquet: 'dir.png' is a folder"),
        (["jobs", "results", "0123", "--parquet", "no/a"], "--parquet: there is no folder 'no'"),
        (["methods", "--docs", "file/docs"], "file' is a file, and the output is a folder"),
        (["demo", "--output", "file"], "--output: 'file' is a file, and the output is a folder"),
    ],
)
def test_outputs_that_cannot_be_written_are_refused_before_the_work(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dir.png").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROPEWAY_MODEL", "/no/such/model")
    monkeypatch.setenv("ROPEWAY_URL", "http://127.0.0.1:9")
    result = ropeway(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", "").split())


@pytest.mark.parametrize("name", ["file", "new", "dir/new"])
def test_outputs_without_the_right_to_them_are_refused_before_the_work(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with unprivileged() as folder:
        monkeypatch.chdir(folder)
        (folder / "file").touch(0o400)
        (folder / "dir").mkdir(0o500)
        folder.chmod(0o500 if name == "new" else 0o700)
        results = [
            ropeway("report", "0123", "-o", name, "--server", "127.0.0.1:9"),
            ropeway("perplexity", "--report", name, "--model", "/no/such/model"),
            ropeway("demo", "--output", f"{name}/docs" if name == "new" else "dir/docs"),
        ]
        folder.chmod(0o700)
    for result in results:
        assert result.exit_code == 2
        assert "there is no right to write to" in " ".join(result.stderr.replace("│", "").split())
