"""A thread writes the lines of a server's log. So a log that nobody reads, or a full disk, holds up no work."""

from __future__ import annotations

import atexit
import os
import select
import threading
from queue import SimpleQueue

import structlog

log = structlog.get_logger()

MOST_WAITING = 10_000
"""Lines that wait for a reader of the log, at most: a few megabytes. Later ones are dropped and counted."""

LAST_LINES_S = 1.0
"""The end of a process waits this long for its last lines."""


class LogWriter:
    """A text stream whose ``write`` takes whole lines, never waits and never raises.

    Once lines can be written again, a line has the number of those that were dropped.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._start()
        os.register_at_fork(after_in_child=self._start)
        atexit.register(self.finish)

    def _start(self) -> None:
        # Its ``put`` takes no lock that a signal's handler could wait for.
        self._waiting: SimpleQueue[str | threading.Event] = SimpleQueue()
        self._dropped = 0
        threading.Thread(target=self._write_all, name="ropeway-log", daemon=True).start()

    def write(self, text: str) -> None:
        if self._waiting.qsize() < MOST_WAITING:
            self._waiting.put(text)
        else:
            self._dropped += 1

    def flush(self) -> None:
        """Nothing: loggers flush every line."""

    def finish(self) -> None:
        """Wait until the lines so far are written, ``LAST_LINES_S`` at most."""
        written = threading.Event()
        self._waiting.put(written)
        written.wait(LAST_LINES_S)

    def _write_all(self) -> None:
        while True:
            item = self._waiting.get()
            if isinstance(item, threading.Event):
                item.set()
            elif not self._write_line(item.encode(errors="backslashreplace")):
                self._dropped += 1
            elif self._dropped:
                dropped, self._dropped = self._dropped, 0
                log.warning("log_lines_dropped", lines=dropped)

    def _write_line(self, line: bytes) -> bool:
        """False when it cannot be written: the disk is full, or the reader is gone."""
        try:
            while line:
                try:
                    line = line[os.write(self._descriptor, line) :]
                except BlockingIOError:
                    select.select([], [self._descriptor], [])
        except OSError:
            return False
        return True
