"""Which requests are sent again, and when: what a server says about that counts before what a client would guess."""

from __future__ import annotations

from typing import Any

from tenacity import AsyncRetrying, RetryCallState, Retrying, retry_if_exception, stop_after_attempt
from tenacity.wait import wait_exponential, wait_random

from service.client.errors import RopewayError
from service.jobs.records import JobInfo, UnitDone

LONGEST_WAIT_S = 120.0
"""A server that asks for more patience than this is not waited for."""

RECONNECTS, RECONNECT_S = 30, 2.0
"""A job is followed across a restart of its server: so often, so many seconds apart."""

GATEWAY = (502, 504)
"""What a proxy answers for a server that is away."""

_backoff = wait_exponential(multiplier=0.5, max=8.0) + wait_random(0, 0.5)


def retrying(max_retries: int) -> Retrying:
    return Retrying(**_policy(max_retries))


def async_retrying(max_retries: int) -> AsyncRetrying:
    return AsyncRetrying(**_policy(max_retries))


def comes_back(error: RopewayError) -> bool:
    """Whether a job may be followed again later: the connection was lost, or its server is ending or away."""
    return error.status is None or error.transient or error.status in GATEWAY


class Following:
    """Where following a job stands, across the connections that it takes."""

    def __init__(self, after: int) -> None:
        self.after, self.ended, self._reconnects = after, False, 0

    def take(self, item: UnitDone | JobInfo, event: str) -> None:
        """An event has come: the connection is good."""
        self._reconnects = 0
        if isinstance(item, UnitDone):
            self.after = item.number
        self.ended = event == "job"

    def lost(self, error: RopewayError) -> None:
        """A connection has ended before the job.

        Raises:
            RopewayError: ``error``, when there is no point in another, or after the last of them.
        """
        if self._reconnects == RECONNECTS or not comes_back(error):
            raise error
        self._reconnects += 1


def _policy(max_retries: int) -> dict[str, Any]:
    stop = stop_after_attempt(max_retries + 1)
    return {"stop": stop, "wait": _wait, "retry": retry_if_exception(_is_transient), "reraise": True}


def _is_transient(error: BaseException) -> bool:
    return isinstance(error, RopewayError) and error.transient and (error.retry_after or 0) <= LONGEST_WAIT_S


def _wait(state: RetryCallState) -> float:
    """Seconds: at least what the server asks for, and at least a wait that doubles, with jitter."""
    error = state.outcome and state.outcome.exception()
    asked = error.retry_after if isinstance(error, RopewayError) else None
    return max(asked or 0.0, _backoff(state))
