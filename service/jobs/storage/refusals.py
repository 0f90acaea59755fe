"""Reasons why the store refuses a call about a job."""

from __future__ import annotations

WHOLE = 32
"""Characters of a whole id; lists in a terminal show the first twelve."""


def hint(given: str) -> str:
    """Words behind a refusal of an id that is too short."""
    return f": a whole id has {WHOLE} characters" if len(given) < WHOLE else ""


class UnknownJob(LookupError):
    """The tenant has no such job."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"no such job: {job_id}{hint(job_id)}")


class UnknownCursor(LookupError):
    """The tenant has no such job to list others before."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"before: no such job: {job_id}{hint(job_id)}; forgotten jobs have no place in the list")


class JobUnfinished(RuntimeError):
    """The job is queued or running: cancel it first."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"job {job_id} has not ended: cancel it first")


class JobDone(RuntimeError):
    """The job is done: there is nothing to go on with."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"job {job_id} is done: there is nothing to resume")


class ResultDamaged(RuntimeError):
    """The bytes of a stored result are damaged."""

    def __init__(self, result_id: str, *, of_job: bool) -> None:
        mended = "resume its job, which makes it again" if of_job else "send its request again"
        super().__init__(f"the stored result {result_id} is damaged: {mended}")


class IdempotencyMismatch(ValueError):
    """An idempotency key was used before, for another request."""

    def __init__(self, key: str) -> None:
        super().__init__(f"Idempotency-Key {key!r} was used for another request: take a new one for each")


class TooManyJobs(RuntimeError):
    """The tenant may have no more unfinished jobs."""

    def __init__(self, most: int) -> None:
        super().__init__(f"{most} unfinished jobs of this API key are the most")


class TooManyJobBytes(RuntimeError):
    """Requests of the tenant's jobs may take up no more bytes."""

    def __init__(self, most: int) -> None:
        super().__init__(f"requests of this API key's jobs take up {most} bytes, the most: forget some that have ended")
