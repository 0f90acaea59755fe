"""Standard output that cannot be written ends the command: a full disk with one line, a closed pipe without."""

from __future__ import annotations

import io
import os
import sys
from typing import NoReturn


class Stdout(io.TextIOWrapper):
    """Ends the command with exit code 1 where the text cannot be written."""

    def __init__(self, usual: io.TextIOWrapper) -> None:
        # Escapes for what the terminal's encoding lacks: the work is done, and its text must not be lost.
        errors = "backslashreplace" if usual.errors in ("strict", "surrogateescape") else usual.errors
        form = {"encoding": usual.encoding, "errors": errors}
        super().__init__(usual.buffer, **form, line_buffering=usual.line_buffering, write_through=usual.write_through)
        self._usual = usual  # Python closes the buffer with it
        self._failed = False

    def write(self, text: str) -> int:
        if self._failed:
            raise SystemExit(1)
        try:
            return super().write(text)
        except OSError as error:
            self._fail(error)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> NoReturn:
        """Python flushes once more as it exits: what is left then goes nowhere."""
        self._failed = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        if not isinstance(error, BrokenPipeError):
            from service.cli.shared.terminal import complain

            complain(f"stdout: {error.strerror}")
        raise SystemExit(1) from None


def guard() -> None:
    """From here on, this process' stdout is a ``Stdout``; a closed one fails at the first text."""
    if sys.stdout is None:
        sys.stdout = open(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8")  # noqa: SIM115 - for the whole process
    if isinstance(sys.stdout, io.TextIOWrapper) and not isinstance(sys.stdout, Stdout):
        sys.stdout = Stdout(sys.stdout)
