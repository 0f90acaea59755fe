"""The texts of a run's folder: models and tokenizer are of them, and other texts are refused or begin anew."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import Result
from structlog.testing import CapturingLogger
from typer.testing import CliRunner

from service.models.training import __main__ as cli
from service.models.training import preparation, shape
from service.models.training.corpus import fingerprint_of_tokens, read_records
from service.models.training.curriculum import Curriculum, Stage
from service.models.training.tokenizer import load_tokenizer
from service.models.training.train import CheckpointMismatch, Run, train
from tests.service.models.training.training_runs import TINY, fresh, packed

STEPS = 3


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("others")
    for number in range(5):
        text = " ".join(f"ship{(number * 7 + i * i) % 23} sails to island{i % 11};" for i in range(600))
        (folder / f"voyage{number}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> CapturingLogger:
    logger = CapturingLogger()
    monkeypatch.setattr(preparation, "log", logger)
    return logger


def command(name: str, corpus: Path, run_dir: Path, *more: str) -> Result:
    options = ["--corpus", str(corpus), "--preset", "tiny", "--run-dir", str(run_dir), *more]
    if name == "all":
        tokens = str(STEPS * TINY.batch * TINY.context)
        options += ["--model", "rope", "--tokens", tokens, "--output", str(run_dir / "out")]
    return CliRunner().invoke(cli.app, [name, *options], env={"COLUMNS": "1000"})


def contents(run_dir: Path) -> dict[str, bytes]:
    kept = (path for path in run_dir.rglob("*") if path.is_file() and path.name != "facts.json")
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in kept}


@pytest.fixture(scope="module")
def complete(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("complete")
    result = command("all", stories, run_dir)
    assert result.exit_code == 0, result.output
    return run_dir


def test_other_texts_are_refused_and_change_nothing(
    complete: Path, stories: Path, others: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(complete, run_dir)
    before = contents(run_dir)
    result = command("all", others, run_dir)
    assert result.exit_code == 2, result.output
    assert "has checkpoints of other texts or another vocabulary (ropeway-demo)" in result.output
    assert "give another --run-dir, or remove it" in result.output
    assert contents(run_dir) == before
    assert "ship" not in (run_dir / "out" / shape.BASE / "README.md").read_text()
    result = command("all", stories, run_dir)  # the same texts still go on
    assert result.exit_code == 0, result.output
    after = contents(run_dir)
    assert all(after[name] == content for name, content in before.items())


def test_another_licence_is_no_other_text(complete: Path, stories: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(complete, run_dir)
    tokens = fingerprint_of_tokens(run_dir)
    result = command("all", stories, run_dir, "--licence", "CC0-1.0")
    assert result.exit_code == 0, result.output
    assert {record.licence for record in read_records(run_dir)} == {"CC0-1.0"}
    assert fingerprint_of_tokens(run_dir) == tokens
    assert "CC0-1.0" in (run_dir / "out" / shape.BASE / "README.md").read_text()


@pytest.mark.parametrize("interrupted", ["", "documents.json", "tokenizer/texts.json"])
def test_without_checkpoints_the_tokenizer_follows_the_texts(
    interrupted: str, stories: Path, others: Path, tmp_path: Path
) -> None:
    """The oracle is a new folder."""
    for corpus in (stories, others):
        assert command("prepare", corpus, tmp_path / "used").exit_code == 0
        if interrupted:
            (tmp_path / "used" / interrupted).unlink(missing_ok=True)
    assert command("prepare", others, tmp_path / "used").exit_code == 0
    assert command("prepare", others, tmp_path / "new").exit_code == 0
    assert contents(tmp_path / "used") == contents(tmp_path / "new")


def test_a_tokenizer_that_was_put_there_stays(
    stories: Path, others: Path, tmp_path: Path, logged: CapturingLogger
) -> None:
    assert command("prepare", others, tmp_path / "first").exit_code == 0
    given = tmp_path / "second/tokenizer"
    given.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "first/tokenizer" / name, given)
    assert command("prepare", stories, tmp_path / "second").exit_code == 0
    assert [call.args[0] for call in logged.calls] == ["tokenizer_kept"]
    name = "tokenizer.json"
    assert (given / name).read_bytes() == (tmp_path / "first/tokenizer" / name).read_bytes()


def test_a_checkpoint_of_other_tokens_is_refused(complete: Path, others: Path, tmp_path: Path) -> None:
    def go_on(run: Run) -> None:
        text = Curriculum(run_dir / "train.bin", tokenizer, (Stage(1.0, TINY.context),), 256, STEPS, 0)
        train(fresh(run_dir, shape.ROTARY), run, text, packed(run_dir, "heldout.bin"), lambda *_: None)

    run_dir = tmp_path / "run"
    shutil.copytree(complete, run_dir)
    tokenizer = load_tokenizer(run_dir / "tokenizer")
    written = torch.load(run_dir / shape.BASE / "checkpoint.pt", weights_only=True)["identity"]
    assert written["data"] == fingerprint_of_tokens(run_dir)
    run = Run(TINY, written["steps"], 0, written["precision"], run_dir / shape.BASE, data=written["data"])
    go_on(run)
    (run_dir / "train.bin").write_bytes((run_dir / "train.bin").read_bytes()[:-2])
    told = r"was written by a run on other texts: repeat that run, give another --run-dir, or remove .* to train anew"
    with pytest.raises(CheckpointMismatch, match=told):
        go_on(replace(run, data=fingerprint_of_tokens(run_dir)))
    with pytest.raises(CheckpointMismatch, match=r"on other texts with \{'seed': 0\}, not \{'seed': 3\}: repeat"):
        go_on(replace(run, data=fingerprint_of_tokens(run_dir), seed=3))
