"""Terms on which a server accepts a job."""

from __future__ import annotations

from typing import NamedTuple


class Terms(NamedTuple):
    """``setup``: servers of another one leave the job alone while one of this setup lives. The job that
    ``idempotency_key`` made before is taken in place of a new one."""

    setup: str | None = None
    idempotency_key: str | None = None


ANY = Terms()
"""Any server may plan the job."""
