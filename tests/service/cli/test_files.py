"""Files of the shell as documents."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import typer

from service.cli.files import documents


def test_a_byte_order_mark_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("ropes", encoding="utf-8-sig")
    assert documents([str(tmp_path / "a.txt")]) == (["a.txt"], "ropes")
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeffropes"))
    assert documents(["-"]) == (["stdin"], "ropes")


def test_every_line_of_a_jsonl_file_is_a_document(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "ropes\\nand lines", "id": 1}\n\n{"text": "decks"}\n')
    assert documents([str(path)]) == (["a.jsonl:1", "a.jsonl:3"], ["ropes\nand lines", "decks"])


@pytest.mark.parametrize("line", ["ropes", '"ropes"', '{"txt": "ropes"}', '{"text": 1}'])
def test_a_jsonl_file_names_its_wrong_line(tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "ropes"}\n' + line)
    with pytest.raises(typer.Exit):
        documents([str(path)])
    assert "line 2: must be a JSON object whose field text" in " ".join(capsys.readouterr().err.split())


def test_an_empty_jsonl_file_is_no_document(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(typer.Exit):
        documents([str(tmp_path / "a.jsonl")])
