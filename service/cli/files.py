"""Input documents of commands, and their output files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from service.cli.terminal import fail, stderr

if TYPE_CHECKING:
    from service.evaluation.results import EvaluationResult


def documents(files: list[str]) -> tuple[list[str], str | list[str] | None]:
    """Names of the files, and the request's input: one text, several, or the name of a built-in document."""
    from service.evaluation.documents import BUILT_IN, close_name

    if not files or (files[0] in BUILT_IN and len(files) == 1 and not Path(files[0]).exists()):
        return [], files[0] if files else None
    texts = []
    for file in files:
        try:
            # A byte order mark is no part of the text, and would be scored.
            read = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8-sig")
            texts.append(read.removeprefix("\ufeff"))
        except OSError as error:
            close = close_name(file)
            fail(f"{file}: {error.strerror}" + (f"; did you mean the built-in document {close}?" if close else ""))
        except UnicodeDecodeError:
            fail(f"{file}: not UTF-8 text")
    names = ["stdin" if file == "-" else Path(file).name for file in files]
    return names, texts[0] if len(texts) == 1 else texts


def check_outputs(
    plots: list[Path] | None, report: Path | None = None, policy: Path | None = None, *, as_json: bool, as_csv: bool
) -> None:
    """Refuse impossible outputs before the work begins.

    Raises:
        typer.BadParameter: for two formats, another picture suffix, or a missing folder.
    """
    if as_json and as_csv:
        raise typer.BadParameter("--json and --csv exclude each other")
    for path in plots or []:
        _check_plot(path)
    for option, file in (("--report", report), ("--policy", policy)):
        if file is not None and not file.absolute().parent.is_dir():
            raise typer.BadParameter(f"there is no folder {str(file.parent)!r}", param_hint=option)


def _check_plot(path: Path) -> None:
    if path.suffix.lower() not in (".png", ".html"):
        raise typer.BadParameter(f"{str(path)!r} must end in .png or .html", param_hint="--plot")
    if not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {str(path.parent)!r}", param_hint="--plot")


def save(path: Path, content: bytes) -> None:
    """Write a file and print its path."""
    try:
        path.write_bytes(content)
    except OSError as error:
        fail(f"{path}: {error.strerror}")
    stderr.print(f"saved {path}", markup=False, soft_wrap=True)


def picture(result: EvaluationResult, path: Path) -> bytes:
    """The first picture as PNG or HTML, by the suffix of ``path``."""
    from service.figures.results import html_of, png_of

    return png_of(result) if path.suffix.lower() == ".png" else html_of(result).encode()
