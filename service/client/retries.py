"""Retry policy: the server's ``Retry-After`` and ``X-Should-Retry`` take precedence over the client's back-off."""

from __future__ import annotations

from typing import Any

from tenacity import AsyncRetrying, RetryCallState, Retrying, retry_if_exception, stop_after_attempt
from tenacity.wait import wait_exponential, wait_random

from service.client.errors import RopewayError
from service.jobs.records import JobInfo, UnitDone

LONGEST_WAIT_S = 120.0
"""Longest ``Retry-After`` in seconds that the client waits for."""

RECONNECTS, RECONNECT_S = 30, 2.0
"""Attempts to follow a job across a restart of its server, and the seconds between them."""

GATEWAY = (502, 504)
"""Status codes of a proxy whose server is away."""

_backoff = wait_exponential(multiplier=0.5, max=8.0) + wait_random(0, 0.5)


def retrying(max_retries: int) -> Retrying:
    return Retrying(**_policy(max_retries))


def async_retrying(max_retries: int) -> AsyncRetrying:
    return AsyncRetrying(**_policy(max_retries))


def comes_back(error: RopewayError) -> bool:
    """True when a job can be followed again: the connection was lost, or the server is ending or away."""
    return error.status is None or error.transient or error.status in GATEWAY


class Following:
    """Progress of following one job over several connections."""

    def __init__(self, after: int) -> None:
        self.after, self.ended, self._reconnects = after, False, 0

    def take(self, item: UnitDone | JobInfo, event: str) -> None:
        """Record an event; it resets the count of attempts."""
        self._reconnects = 0
        if isinstance(item, UnitDone):
            self.after = item.number
        self.ended = event == "job"

    def lost(self, error: RopewayError) -> None:
        """Count a connection that ended before the job did.

        Raises:
            RopewayError: ``error``, when it is permanent or the attempts are used up.
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
    """Seconds: the larger of ``Retry-After`` and an exponential back-off with jitter."""
    error = state.outcome and state.outcome.exception()
    asked = error.retry_after if isinstance(error, RopewayError) else None
    return max(asked or 0.0, _backoff(state))
