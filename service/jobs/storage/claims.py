"""Answers of the queue to a process that claims jobs and units."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from service.jobs.storage.units import ClaimedUnit


class LeaseLost(RuntimeError):
    """The job is no longer this process's: it was cancelled, or another took it."""


class Recorded(Enum):
    """Finished units were recorded, and others are ``LEFT``; or it was the ``LAST``, and the process owns the job. The
    job is ``LOST``: it has ended."""

    LEFT = 1
    LAST = 2
    LOST = 3


@dataclass(frozen=True)
class Claimed:
    """A job that this process works on. ``others_may``: another process accepted it, and one lives that takes it."""

    number: int
    id: str
    tenant: str
    request: dict[str, Any]
    others_may: bool = False


class Taken(NamedTuple):
    """Units of the plan with the digest ``plan`` that this process has claimed."""

    plan: str
    units: list[ClaimedUnit]
