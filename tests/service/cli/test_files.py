"""Files of the shell as documents."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zipfile
from pathlib import Path

import pytest
import typer

from service.cli.shared.files import documents


def test_a_byte_order_mark_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("ropes", encoding="utf-8-sig")
    assert documents([str(tmp_path / "a.txt")]) == (["a.txt"], "ropes")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\ufeffropes".encode())))
    assert documents(["-"]) == (["stdin"], "ropes")


def test_files_of_one_name_have_their_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, text in (("one", "ropes"), ("two", "decks")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text("masts")
    assert documents(["one/a.txt", "two/a.txt", "b.txt"])[0] == ["one/a.txt", "two/a.txt", "b.txt"]


def test_every_line_of_a_jsonl_file_is_a_document(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "ropes\\nand lines", "id": 1}\n\n{"text": "decks"}\n')
    assert documents([str(path)]) == (["a.jsonl:1", "a.jsonl:3"], ["ropes\nand lines", "decks"])


@pytest.mark.parametrize("line", ["ropes", '"ropes"', '{"txt": "ropes"}', '{"text": 1}', '{"text": ""}'])
def test_a_jsonl_file_names_its_wrong_line(tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "ropes"}\n' + line)
    with pytest.raises(typer.Exit):
        documents([str(path)])
    assert "line 2: must be a JSON object whose field text" in " ".join(capsys.readouterr().err.split())


def test_half_a_surrogate_pair_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "ropes \\ud83d\\ude00"}\n{"text": "ropes \\ud800"}\n')
    with pytest.raises(typer.Exit):
        documents([str(path)])
    assert f"error: {path}, line 2: its text has half a surrogate pair" in " ".join(capsys.readouterr().err.split())


def test_a_name_of_a_file_is_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        documents([f"{tmp_path}/lat\udce9n.txt"])
    told = capsys.readouterr().err
    assert "lat\\udce9n.txt': the name of a file must be UTF-8 text: rename it" in told


def test_a_name_is_utf_8_in_any_locale(tmp_path: Path) -> None:
    path = tmp_path / "机器.txt"
    path.write_text("ropes")
    assert documents([str(path).encode().decode("ascii", "surrogateescape")]) == (["机器.txt"], "ropes")


def test_an_empty_jsonl_file_is_no_document(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(typer.Exit):
        documents([str(tmp_path / "a.jsonl")])


def zipped() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a.txt", "ropes")
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt.gz", gzip.compress(b"ropes"), "is packed by gzip, and a document is plain text: unpack it first"),
        ("a.txt", bz2.compress(b"ropes"), "is packed by bzip2"),
        ("a.xz", lzma.compress(b"ropes"), "is packed by xz"),
        ("a.docx", zipped(), "is packed by zip"),
        ("a.txt", "a café".encode("latin-1"), "must be UTF-8 text, and byte 6 is not: convert it"),
        ("a.txt", "ropes".encode("utf-16-le"), "must be UTF-8 text, and looks like UTF-16: convert it, as with iconv"),
        ("a.txt", "ropes".encode("utf-16-be"), "must be UTF-8 text, and looks like UTF-16"),
        ("a.CSV", b"id,text\n1,ropes\n", "is a table, and a document is plain text: use .jsonl with a `text` per line"),
        ("a.json", b'[{"text": "ropes"}]', "is a list, and a document is a text: use .jsonl with a `text` per line"),
        ("a.txt", b"", "is empty, and a document has at least 2 tokens"),
        ("a.txt", "".encode("utf-8-sig"), "is empty"),
    ],
    ids=["gzip", "bzip2", "xz", "zip", "latin", "UTF-16 LE", "UTF-16 BE", "table", "list", "empty", "only a mark"],
)
def test_a_file_that_is_no_text_is_refused_by_name(
    tmp_path: Path, name: str, content: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(typer.Exit):
        documents([str(path)])
    assert f"error: {path}: {message}" in " ".join(capsys.readouterr().err.split())


def test_a_folder_is_refused_with_the_way_to_name_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        documents([f"{tmp_path}/"])
    told = " ".join(capsys.readouterr().err.split())
    assert "is a folder, and a document is a file: name its files, as in" in told
    assert f"{tmp_path}/*.txt" in told


def test_few_zero_bytes_are_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ropes and\0")
    assert documents([str(tmp_path / "a.txt")]) == (["a.txt"], "ropes and\0")


def test_ends_of_lines_are_line_feeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_bytes(b"a\r\nb\rc\n")
    assert documents([str(tmp_path / "a.txt")]) == (["a.txt"], "a\nb\nc\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\r\nb\rc\n")))
    assert documents(["-"]) == (["stdin"], "a\nb\nc\n")
