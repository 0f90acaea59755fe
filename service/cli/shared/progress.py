"""Progress of long commands: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from service.cli.shared.terminal import stderr
from service.evaluation.formatting import printable

LINE_S = 5.0
"""Seconds between two lines without a terminal."""

MEASURED_S = 2.0
"""Seconds of counting before the first estimate."""

LONG_S = 20.0
"""Longer estimates, in seconds, are announced."""

Show = Callable[[int, int, str], None]
"""Called with the tokens done, all tokens, and the label of the current unit."""


@contextmanager
def progress() -> Iterator[Show]:
    """A function that shows progress."""
    lines = _Lines()
    if stderr.is_terminal:
        with _bar() as bar:
            task = bar.add_task("waiting", total=None)

            def update(done: int, total: int, label: str) -> None:
                bar.update(task, completed=done, total=total, description=printable(label))
                lines.announce(done, total)

            yield update
    else:

        def line(done: int, total: int, label: str) -> None:
            lines.announce(done, total)
            lines.print(done, total, label)

        yield line


def _bar() -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=stderr,
        transient=True,
    )


class _Lines:
    """Printed lines, with the seconds left at the rate so far."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None
        self._announced = False
        self._line_at = time.monotonic() + LINE_S

    def seconds_left(self, done: int, total: int) -> float | None:
        """None before ``MEASURED_S``; the wait for the first token does not count."""
        now = time.monotonic()
        if self._first is None:
            if not done:
                return None
            self._first = now, done
        began, before = self._first
        if done <= before or now - began < MEASURED_S:
            return None
        return (now - began) / (done - before) * (total - done)

    def announce(self, done: int, total: int) -> None:
        """Print the estimate once, if it is over ``LONG_S``."""
        left = self.seconds_left(done, total)
        if self._announced or left is None:
            return
        self._announced = True
        if left >= LONG_S:
            _say(f"{total - done:,} more tokens to read, about {duration(left)}")

    def print(self, done: int, total: int, label: str) -> None:
        if time.monotonic() < self._line_at:
            return
        self._line_at = time.monotonic() + LINE_S
        left = self.seconds_left(done, total)
        rest = "" if left is None else f", about {duration(left)} left"
        _say(f"{100 * done / max(total, 1):3.0f} %: {done:,} of {total:,} tokens, {printable(label)}{rest}")


def duration(seconds: float) -> str:
    """``40 s``, ``3 min`` or ``2.5 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _say(text: str) -> None:
    stderr.print(text, markup=False, soft_wrap=True)
