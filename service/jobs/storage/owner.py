"""The owner of a job: one process, distinct from later ones with its number."""

from __future__ import annotations

import json
import os
import socket
import uuid
from contextlib import suppress
from typing import NamedTuple

import psutil

CLOCK_S = 5.0
"""By how much a process's start may seem to move when the system's clock is set."""


class Owner(NamedTuple):
    """``host`` names the machine and the namespace of its process numbers, which differs between containers.
    ``started`` is in seconds since 1970; ``instance`` names one store of the process."""

    host: str
    pid: int
    started: float
    instance: str

    @classmethod
    def this(cls) -> Owner:
        """A new owner in this process."""
        return cls(_host(), os.getpid(), psutil.Process().create_time(), uuid.uuid4().hex)

    @classmethod
    def parse(cls, text: str) -> Owner:
        return cls(*json.loads(text))

    def __str__(self) -> str:
        return json.dumps(self)

    def is_gone(self) -> bool:
        """True if this was a process of this machine and has ended. Processes elsewhere count as alive."""
        if self.host != _host():
            return False
        try:
            process = psutil.Process(self.pid)
            return process.status() == psutil.STATUS_ZOMBIE or abs(process.create_time() - self.started) > CLOCK_S
        except psutil.NoSuchProcess:
            return True


def _host() -> str:
    name = socket.gethostname()
    with suppress(OSError):  # Linux only
        name = f"{name} {os.readlink('/proc/self/ns/pid')}"
    return name
