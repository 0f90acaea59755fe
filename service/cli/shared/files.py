"""Input documents of commands, and their output files."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from service.cli.shared.terminal import fail, stderr
from service.machine.files import replace

if TYPE_CHECKING:
    from service.evaluation.results import EvaluationResult


TABLES = (".csv", ".tsv")
"""Ends of names of files whose text is no prose."""

PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip"}
"""First bytes of packed files."""

PICTURES = (".png", ".svg", ".pdf", ".html")
"""Ends of names of pictures."""

IN_PLACE = (errno.EACCES, errno.EPERM, errno.EBUSY)
"""Errors where a file may be written to and not replaced: its folder is another's, or it is mounted alone."""


def documents(files: list[str]) -> tuple[list[str], str | list[str] | None]:
    """Names of the documents, and the request's input: one text, several, or the name of a built-in document.

    A file is a document, and every line of a ``.jsonl`` file is one.
    """
    from service.evaluation.documents import BUILT_IN

    if not files or (files[0] in BUILT_IN and len(files) == 1 and not Path(files[0]).exists()):
        return [], files[0] if files else None
    names, named = [_name_of(file) for file in files], list[tuple[str, str]]()
    for file, name in zip(files, names, strict=True):
        named += _documents_in(file, name if names.count(name) == 1 else file, _text_of(file))
    texts = [text for _, text in named]
    return [name for name, _ in named], texts[0] if len(texts) == 1 else texts


def _text_of(file: str) -> str:
    """The text of a file, or of stdin for ``-``."""
    from service.evaluation.documents import close_name

    shown = "stdin" if file == "-" else file
    if file.lower().endswith(TABLES):
        fail(f"{file}: is a table, and a document is plain text: use .jsonl with a `text` per line, or '-' for stdin")
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except IsADirectoryError:
        fail(f"{file}: is a folder, and a document is a file: name its files, as in {file.rstrip('/')}/*.txt")
    except OSError as error:
        close = close_name(file)
        fail(f"{file}: {error.strerror}" + (f"; did you mean the built-in document {close}?" if close else ""))
    packed = next((name for start, name in PACKED.items() if content.startswith(start)), None)
    if packed is not None:
        fail(f"{shown}: is packed by {packed}, and a document is plain text: unpack it first")
    text = decoded(content, shown)
    if not text:
        fail(f"{shown}: is empty, and a document has at least 2 tokens")
    return text


def _name_of(file: str) -> str:
    name = "stdin" if file == "-" else as_utf_8(Path(file).name)
    if not _is_text(name):
        fail(f"{file!a}: the name of a file must be UTF-8 text: rename it, or use '-' for stdin")
    return name


def as_utf_8(value: Any) -> Any:
    """Texts of arguments, also inside lists and objects, as UTF-8 where the locale has another encoding.

    Python has half surrogate pairs for their bytes then. Texts that are not UTF-8 stay as they are.
    """
    if isinstance(value, dict):
        return {name: as_utf_8(each) for name, each in value.items()}
    if isinstance(value, list):
        return [as_utf_8(each) for each in value]
    if isinstance(value, str) and not _is_text(value):
        with suppress(UnicodeError):
            return os.fsencode(value).decode()
    return value


def _is_text(value: str) -> bool:
    """False with half a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def decoded(content: bytes, name: str) -> str:
    """The text of the file ``name``. Its lines end with line feeds, whatever they ended with."""
    try:
        # A byte order mark is no part of the text, and would be scored.
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        fail(f"{name}: must be UTF-8 text, and byte {error.start + 1} is not: convert it, as with iconv")
    if text.count("\0") > len(text) / 10:
        fail(f"{name}: must be UTF-8 text, and looks like UTF-16: convert it, as with iconv")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _documents_in(file: str, name: str, content: str) -> list[tuple[str, str]]:
    """(name, text) of every document of a file: the field ``text`` of each line of a ``.jsonl`` file."""
    if not name.lower().endswith(".jsonl"):
        if name.lower().endswith(".json") and _has_several(content):
            fail(f"{file}: is a list, and a document is a text: use .jsonl with a `text` per line, or '-' for stdin")
        return [(name, content)]
    found = []
    # A text may have other ends of lines inside.
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except ValueError:
            fields = None
        text = fields.get("text") if isinstance(fields, dict) else None
        if not isinstance(text, str) or not text:
            fail(f"{file}, line {number}: must be a JSON object whose field text is a string that is not empty")
        if not _is_text(text):
            fail(f"{file}, line {number}: its text has half a surrogate pair, and must be UTF-8 text")
        found.append((f"{name}:{number}", text))
    if not found:
        fail(f"{file}: has no document")
    return found


def _has_several(content: str) -> bool:
    """True for JSON that is a list, of texts or of objects with them."""
    try:
        return isinstance(json.loads(content), list)
    except (ValueError, RecursionError):
        return False


def check_outputs(
    plots: list[Path] | None,
    picture_name: str | None,
    report: Path | None,
    policy: Path | None = None,
    *,
    as_json: bool,
    as_csv: bool,
) -> None:
    """Refuse impossible outputs before the work begins.

    Raises:
        typer.BadParameter: for two formats, another suffix, --picture alone or an unusable file.
    """
    refuse_several({"--json": as_json, "--csv": as_csv})
    if picture_name is not None and not plots:
        raise typer.BadParameter("--picture needs --plot: it names the picture that --plot saves")
    for path in plots or []:
        if path.suffix.lower() not in PICTURES:
            raise typer.BadParameter(f"{str(path)!r} must end in {', '.join(PICTURES)}", param_hint="--plot")
    check_files(*(("--plot", path) for path in plots or []), ("--report", report), ("--policy", policy))
    check_page("--report", report)


def check_page(option: str, path: Path | None) -> None:
    """Refuse a name that is not of a page.

    Raises:
        typer.BadParameter: naming ``option``.
    """
    if path is not None and path.suffix.lower() not in (".html", ".htm"):
        raise typer.BadParameter(f"{str(path)!r} must end in .html", param_hint=option)


def check_files(*outputs: tuple[str, Path | None]) -> None:
    """Refuse files that cannot be written. ``outputs`` are options and their values.

    Raises:
        typer.BadParameter: naming the option.
    """
    taken: dict[str, str] = {}
    for option, file in outputs:
        if file is None:
            continue
        with _refused(option):
            if not file.absolute().parent.is_dir():
                raise typer.BadParameter(f"there is no folder {str(file.parent)!r}", param_hint=option)
            if file.is_dir():
                raise typer.BadParameter(f"{str(file)!r} is a folder, and the output is a file", param_hint=option)
            _check_right(option, file if file.exists() else file.parent)
            if (place := os.path.realpath(file)) in taken:
                raise typer.BadParameter(f"{str(file)!r} is the file of {taken[place]} already", param_hint=option)
        taken[place] = option


def check_folder(option: str, folder: Path) -> None:
    """Refuse a folder that cannot be made or written to.

    Raises:
        typer.BadParameter: naming ``option``.
    """
    with _refused(option):
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not there.is_dir():
            raise typer.BadParameter(f"{str(there)!r} is a file, and the output is a folder", param_hint=option)
        _check_right(option, there)


def _check_right(option: str, place: Path) -> None:
    if not os.access(place, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        raise typer.BadParameter(f"there is no right to write to {str(place)!r}", param_hint=option)


@contextmanager
def _refused(option: str) -> Iterator[None]:
    """A name that the system refuses, such as one that is too long, is a wrong value of ``option``."""
    try:
        yield
    except OSError as error:
        raise typer.BadParameter(f"{error.filename}: {error.strerror}", param_hint=option) from None


def refuse_several(given: Mapping[str, object]) -> None:
    """Refuse two options for the form of one result.

    Raises:
        typer.BadParameter: naming the first two that are given.
    """
    names = [name for name, value in given.items() if value]
    if len(names) > 1:
        raise typer.BadParameter(f"{names[0]} and {names[1]} exclude each other")


def save(path: Path, content: bytes) -> None:
    """Write a file and print its path."""
    try:
        write(path, content)
    except OSError as error:
        fail(f"{path}: {error.strerror}")
    stderr.print(f"saved {path}", markup=False, soft_wrap=True)


def write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, where it can be replaced. Pipes, devices, open files and files of several names
    are written to."""
    if path.exists():
        if _is_open(path) or not path.is_file() or path.stat().st_nlink > 1:
            path.write_bytes(content)
            return
        os.close(os.open(path, os.O_WRONLY))  # replacing needs no right to the file itself
    try:
        replace(path, content)
    except OSError as error:
        if error.errno not in IN_PLACE or not path.exists():
            raise
        path.write_bytes(content)


def _is_open(path: Path) -> bool:
    """The name leads to an open file of a process, as /dev/stdout does."""
    while True:
        path = path.parent.resolve() / path.name
        if path.is_relative_to("/proc"):
            return True
        if not path.is_symlink():
            return False
        path = path.parent / path.readlink()


def picture(result: EvaluationResult, path: Path, name: str | None = None) -> bytes:
    """The picture called ``name``, or the first, as a file of the kind that ends like ``path``."""
    from service.figures.results import NoSuchPicture, html_of, picture_of

    try:
        match path.suffix.lower():
            case ".png":
                return picture_of(result, name).png()
            case ".svg":
                return picture_of(result, name).svg().encode()
            case ".pdf":
                return picture_of(result, name).pdf()
            case _:
                return html_of(result, name=name).encode()
    except NoSuchPicture as error:
        fail(f"--picture: {error}")


def save_pictures(result: EvaluationResult, plots: list[Path] | None, name: str | None) -> None:
    """Save the picture called ``name``, or the first, to each of ``plots``."""
    for path in plots or []:
        save(path, picture(result, path, name))
