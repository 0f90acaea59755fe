"""The two consoles: results go to stdout, progress and errors to stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich import box
from rich.console import Console
from rich.status import Status
from rich.table import Table

stdout = Console(highlight=False)
stderr = Console(stderr=True, highlight=False)

CONTROL = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """``text`` without control characters, which could control the terminal."""
    return text.translate(CONTROL)


def new_table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """A table without frame; the columns among ``numbers`` are aligned to the right."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold", justify="right" if column in numbers else "left")
    return made


def status(message: str) -> Status:
    """A spinner on stderr; invisible without a terminal."""
    return stderr.status(message)


@contextmanager
def loading(model: str) -> Iterator[None]:
    """Show that ``model`` is loading: a spinner on a terminal, one line elsewhere."""
    line = f"loading {printable(model)}"
    if not stderr.is_terminal:
        stderr.print(line, markup=False, soft_wrap=True)
    with status(line):
        yield


def fail(message: str) -> NoReturn:
    """Print to stderr and end with exit code 1."""
    stderr.print(f"error: {printable(message)}", style="red", markup=False, soft_wrap=True)
    raise typer.Exit(1)
