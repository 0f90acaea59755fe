"""The two consoles: results go to stdout, everything about how it goes to stderr."""

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
    """Generated text without control characters, which could drive the reader's terminal."""
    return text.translate(CONTROL)


def new_table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """A table without frame; the columns among ``numbers`` are aligned to the right."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold", justify="right" if column in numbers else "left")
    return made


def status(message: str) -> Status:
    """A spinner on stderr while something takes its time; invisible where stderr is no terminal."""
    return stderr.status(message)


@contextmanager
def loading(model: str) -> Iterator[None]:
    """The line of every command that waits for ``model``: with a spinner on a terminal, printed once elsewhere."""
    line = f"loading {printable(model)}"
    if not stderr.is_terminal:
        stderr.print(line, markup=False, soft_wrap=True)
    with status(line):
        yield


def fail(message: str) -> NoReturn:
    """Print to stderr and leave with exit code 1."""
    stderr.print(f"error: {printable(message)}", style="red", markup=False, soft_wrap=True)
    raise typer.Exit(1)
