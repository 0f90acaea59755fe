"""The two consoles: results go to stdout, progress and errors to stderr."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NoReturn

import typer
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.status import Status
from rich.table import Column, Table
from rich.text import Text

from service.cli import interrupts
from service.evaluation.formatting import printable

stdout = Console(highlight=False)
stderr = Console(stderr=True, highlight=False)

LEAST_WIDTH, BETWEEN = 8, 3
"""Characters of a column that folds its text, and between two columns."""


def new_table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """A table without frame; the columns among ``numbers`` are aligned to the right and stay whole."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        made.add_column(
            column, overflow="fold", justify="right" if column in numbers else "left", no_wrap=column in numbers
        )
    return made


def print_table(table: Table) -> None:
    """Print to stdout. Names, in the first column, stay in one piece if the others have room enough beside them.

    The caption has the width of the terminal: rich folds it at the table's, which may be a few words.
    """
    first, *others = table.columns
    widths = [_width(first), *(_least(column) for column in others)]
    first.no_wrap = sum(widths) + BETWEEN * len(widths) <= stdout.width
    caption, table.caption = table.caption, None
    stdout.print(table)
    if caption:
        stdout.print(caption if isinstance(caption, Text) else Text(str(caption)), style="table.caption")


def keep_words(table: Table, header: str) -> None:
    """Give a column the room that the others leave. If that breaks a word, the others fold between words.

    rich would give it less, and break words.
    """
    column = next(column for column in table.columns if column.header == header)
    others = [other for other in table.columns if other is not column]
    free = stdout.width - BETWEEN * len(table.columns)
    left = free - sum(map(_width, others))
    most = free - sum(_measured(other).minimum for other in others)
    word, whole = _measured(column)
    column.width = min(whole, max(left, min(word, most), LEAST_WIDTH))


def _least(column: Column) -> int:
    """Characters that a column takes folded."""
    return column.width or (_width(column) if column.no_wrap else LEAST_WIDTH)


def _width(column: Column) -> int:
    """Characters that a column takes unfolded."""
    return _measured(column).maximum


def _measured(column: Column) -> Measurement:
    """Characters of a column's longest word, and of its longest line."""
    options = stdout.options.update(width=1 << 16)
    found = [Measurement.get(stdout, options, cell) for cell in (column.header, *column.cells)]
    return Measurement(max(one.minimum for one in found), max(one.maximum for one in found))


def status(message: str) -> Status:
    """A spinner on stderr; invisible without a terminal."""
    return stderr.status(message)


@contextmanager
def loading(model: str, *, here: bool = False) -> Iterator[None]:
    """Show that ``model`` is loading: a spinner on a terminal, one line elsewhere. Ctrl-C ends a process that loads it
    ``here`` at once.

    Raises:
        typer.Exit: 130 after Ctrl-C.
    """
    line = f"loading {printable(model)}"
    if not stderr.is_terminal:
        stderr.print(line, markup=False, soft_wrap=True)
    spinner = status(line)

    def interrupted() -> None:
        spinner.stop()
        stderr.print(f"{line} was interrupted", markup=False, soft_wrap=True)

    try:
        with spinner, interrupts.ending_with(interrupted) if here else nullcontext():
            yield
    except KeyboardInterrupt:
        interrupted()
        raise typer.Exit(128 + signal.SIGINT) from None


def fail(message: str) -> NoReturn:
    """Print to stderr and end with exit code 1."""
    complain(message)
    raise typer.Exit(1)


def complain(message: str) -> None:
    """Print an error to stderr."""
    stderr.print(f"error: {printable(message)}", style="red", markup=False, soft_wrap=True)
