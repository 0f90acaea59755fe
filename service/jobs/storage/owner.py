"""The owner of a job: one process, distinct from later ones with its number."""

from __future__ import annotations

import json
import os
import socket
import uuid
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

BOOT_ID, NAMESPACE = "/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"
"""Linux only. Machines of one name, such as copies of one, differ by what they drew at their start."""

CLOCK_S = 5.0
"""By how much a process's start may seem to move when the system's clock is set."""


class Owner(NamedTuple):
    """``host`` names the machine, its start and the namespace of its process numbers, which differs between containers.
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
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path(BOOT_ID).read_text().strip())
    with suppress(OSError):
        parts.append(os.readlink(NAMESPACE))
    return " ".join(parts)
