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

SINCE_BOOT = "since boot"
"""Part of a host's name where starts are counted so. Records of former versions, and of their wall-clock starts, count
as another machine's: their leases run out."""

STARTED = 19
"""Index of a process's start in its /proc/PID/stat behind the name, in clock ticks."""

CLOCK_S = 5.0
"""By how much a process's start may seem to move when the system's clock is set, except on Linux."""


class Owner(NamedTuple):
    """``host`` names the machine, its start and the namespace of its process numbers, which differs between containers.
    ``started`` is in seconds since the boot on Linux, which no step of the clock changes, and since 1970 elsewhere.
    ``instance`` names one store of the process."""

    host: str
    pid: int
    started: float
    instance: str

    @classmethod
    def this(cls) -> Owner:
        """A new owner in this process."""
        return cls(_host(), os.getpid(), _started(psutil.Process()), uuid.uuid4().hex)

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
            allowed = 0.0 if psutil.LINUX else CLOCK_S
            return process.status() == psutil.STATUS_ZOMBIE or abs(_started(process) - self.started) > allowed
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            return True


def _started(process: psutil.Process) -> float:
    """When it started. psutil adds the time of the boot on Linux, which moves with the clock."""
    if not psutil.LINUX:
        return process.create_time()
    fields = Path(f"/proc/{process.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return int(fields[STARTED]) / os.sysconf("SC_CLK_TCK")


def _host() -> str:
    parts = [socket.gethostname()] + [SINCE_BOOT] * psutil.LINUX
    with suppress(OSError):
        parts.append(Path(BOOT_ID).read_text().strip())
    with suppress(OSError):
        parts.append(os.readlink(NAMESPACE))
    return " ".join(parts)
