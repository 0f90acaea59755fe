"""A prepared run and the models that one command trains in it, once for all files."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from service.models.training import __main__ as cli
from tests.service.models.training.training_runs import HELDOUT, STEPS, TINY, story


@pytest.fixture(scope="session")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stories")
    for number in range(5):
        (folder / f"story{number}.txt").write_text(story(number), encoding="utf-8")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    return folder


@pytest.fixture(scope="session")
def run_dir(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    options = ["--corpus", str(stories), "--licence", "CC0-1.0", "--heldout", HELDOUT, "--preset", "tiny"]
    result = CliRunner().invoke(cli.app, ["prepare", *options, "--run-dir", str(folder)])
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(scope="session")
def trained(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both models, trained by one command for 20 steps each."""
    output = tmp_path_factory.mktemp("demo")
    tokens = str(STEPS * TINY.batch * TINY.context)
    options = ["--preset", "tiny", "--tokens", tokens, "--run-dir", str(run_dir), "--output", str(output)]
    result = CliRunner().invoke(cli.app, ["train", *options])
    assert result.exit_code == 0, result.output
    return output
