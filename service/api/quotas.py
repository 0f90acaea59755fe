"""Quotas of a request: memory and token rate, checked and taken in one step before tokenization."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, cast

import structlog
from fastapi import Request
from limits import RateLimitItemPerMinute
from limits.aio.storage import SlidingWindowCounterSupport
from limits.aio.strategies import SlidingWindowCounterRateLimiter

from service import context
from service.errors import ApiError, bad_request
from service.settings import Settings
from service.sharing.admission import Admission, Ticket
from service.sharing.limits import RETRY_S, LimitsOutOfReach, SharedLimits, reached, storage_of

log = structlog.get_logger()

Window = tuple[int, float, int, float]
"""Tokens of the minute before and seconds until they count no more, and both of the minute now."""

RATE_HEADERS = ("x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens")
"""Of answers to requests that a rate counts: tokens a minute, those left, and the time until all are."""

SLACK_S = 0.1
"""A minute of the shared store begins with a charge, and its clock has milliseconds."""

SOON_S = 0.2
"""Seconds that an answer waits for its headers to count what came back."""


class TokenRate:
    """Tokens that one tenant may use in a minute. The window slides by weighting the last two minutes, which
    takes constant memory however many tokens one request costs. With ``shared``, all replicas count together."""

    def __init__(self, tokens_per_minute: int | None, shared: SharedLimits | None = None) -> None:
        self._limit = None if tokens_per_minute is None else RateLimitItemPerMinute(tokens_per_minute)
        self._limiter = SlidingWindowCounterRateLimiter(storage_of(shared))

    async def check(self, least: int = 1) -> None:
        """``least`` is how many tokens the request asks for at least: the time to wait is theirs.

        Raises:
            ApiError: 429 when the tenant has used up its minute.
        """
        if self._limit is None:
            return
        async with reached():
            if not await self._limiter.test(self._limit, context.current().tenant):
                raise await self._refusal(self._limit, min(least, self._limit.amount))

    @property
    def most(self) -> int:
        """Most tokens of one request."""
        return sys.maxsize if self._limit is None else self._limit.amount

    async def left(self, prompt_tokens: int) -> int:
        """New tokens that the tenant may ask for now beside those of a prompt. They are a tenth of a minute's at least,
        for which it may have to wait.

        Raises:
            LimitsOutOfReach: when the store does not answer.
        """
        if self._limit is None:
            return self.most
        async with reached():
            window = await self._limiter.get_window_stats(self._limit, context.current().tenant)
        least = min(self._limit.amount // 10, self.most - prompt_tokens)
        return max(window.remaining - prompt_tokens, least)

    async def give_back(self, tokens: int, tenant: str, after_s: float) -> None:
        """Count ``tokens`` less. The tenant was charged for them ``after_s`` seconds ago. Those of an earlier minute of
        the limiter stay: they count less and less. A store that does not answer is asked again within the minute.
        """
        if self._limit is None or tokens <= 0:
            return
        charged = time.monotonic() - after_s
        try:
            await self._give_back(self._limit, tokens, tenant, charged)
        except LimitsOutOfReach:
            _go_on(self._give_back_later(self._limit, tokens, tenant, charged))

    async def _give_back_later(self, limit: RateLimitItemPerMinute, tokens: int, tenant: str, charged: float) -> None:
        while time.monotonic() - charged < limit.get_expiry() + SLACK_S:
            await asyncio.sleep(RETRY_S)
            with suppress(LimitsOutOfReach):
                await self._give_back(limit, tokens, tenant, charged)
                return
        log.warning("tokens_not_given_back", tokens=tokens, reason="the shared store did not answer within the minute")

    async def _give_back(self, limit: RateLimitItemPerMinute, tokens: int, tenant: str, charged: float) -> None:
        """Raises:
        LimitsOutOfReach: when the store does not answer, and nothing has changed.
        """
        storage, key = cast(SlidingWindowCounterSupport, self._limiter.storage), limit.key_for(tenant)
        async with reached():
            _, _, current, current_left = await storage.get_sliding_window(key, limit.get_expiry())
        if current < tokens or time.monotonic() - charged > 2 * limit.get_expiry() - current_left + SLACK_S:
            return
        try:
            async with reached():
                await self._limiter.hit(limit, tenant, cost=-tokens)
        except LimitsOutOfReach as error:  # it may count them all the same: a second time would be too many
            log.warning("tokens_not_given_back", tokens=tokens, reason=str(error))

    async def charge(self, tokens: int, param: str | None = None) -> None:
        """Count the tokens of a request, now that they are known. ``param`` is the field to change where they are too
        many.

        Raises:
            ApiError: 429 when they are more than is left, 400 when they are more than a minute's.
        """
        if self._limit is None:
            return
        if tokens > self._limit.amount:
            message = f"the request asks for {tokens} tokens and this API key may ask for {self._limit.amount} a minute"
            raise bad_request(f"{param}: {message}" if param else message, param, "token_rate_exceeded")
        async with reached():
            if not await self._limiter.hit(self._limit, context.current().tenant, cost=tokens):
                raise await self._refusal(self._limit, tokens)
            await self._told(self._limit)

    async def tell(self) -> None:
        """Give the answer the tenant's state as it is now, if the store answers."""
        if self._limit is not None:
            with suppress(LimitsOutOfReach):
                async with reached():
                    await self._told(self._limit)

    async def _refusal(self, limit: RateLimitItemPerMinute, tokens: int) -> ApiError:
        window = await self._told(limit)
        wait = max(1, math.ceil(_seconds_until(tokens, limit, window)))
        message = f"this API key may ask for {limit.amount} tokens a minute"
        return ApiError(429, message, code="token_rate_exceeded", headers={"Retry-After": str(wait)})

    async def _told(self, limit: RateLimitItemPerMinute) -> Window:
        """The state of the tenant's limiter, which the answer has in headers, by the names of OpenAI's API."""
        current, storage = context.current(), cast(SlidingWindowCounterSupport, self._limiter.storage)
        window = await storage.get_sliding_window(limit.key_for(current.tenant), limit.get_expiry())
        before, before_left, in_this, _ = window
        used = int(before * before_left / limit.get_expiry() + in_this)
        reset = max(0, math.ceil(_seconds_until(limit.amount, limit, window)))
        told = str(limit.amount), str(max(0, limit.amount - used)), f"{reset}s"
        current.headers |= dict(zip(RATE_HEADERS, told, strict=True))
        return window


def _seconds_until(tokens: int, limit: RateLimitItemPerMinute, window: Window) -> float:
    """Seconds until ``tokens`` fit, if no others are counted before.

    The limiter counts fixed minutes, and weights the one before by its part in the last 60 s. Its own
    ``reset_time`` is the moment at which one token leaves.
    """
    before, before_left, current, current_left = window
    minute, below = limit.get_expiry(), limit.amount - tokens + 1
    if current < below:
        return before_left - minute * (below - current) / before if before else 0.0
    return current_left - minute * below / current


def upper_bound(item: str | list[int], capacity: int) -> int:
    """Most tokens that a prompt can have, without tokenizing it. A token covers at least one byte, and a tokenizer may
    add one at each end."""
    if isinstance(item, str) and len(item) < capacity:
        return len(item.encode("utf-8", "surrogatepass")) + 2
    return len(item)


def rate_of(request: Request) -> TokenRate:
    rate: TokenRate = request.app.state.token_rate
    return rate


async def admit(request: Request, wanted: Sequence[tuple[Admission, int]], least: int = 1) -> list[Ticket]:
    """A ticket for every (admission, upper bound of tokens), all or none. Unreleased tickets are released when the
    request has been answered. ``least`` is how many tokens the request asks for at least.

    Raises:
        ApiError, QueueFull: when the rate is used up, or there is neither room nor a place in the queue.
    """
    await rate_of(request).check(least)
    # No await from here on: what is checked is what is taken.
    sizes: dict[Admission, list[int]] = {}
    for admission, size in wanted:
        sizes.setdefault(admission, []).append(size)
    for admission, several in sizes.items():
        admission.check_room(several)
    tickets = {admission: iter(admission.enter(several)) for admission, several in sizes.items()}
    entered = [next(tickets[admission]) for admission, _ in wanted]
    for ticket in entered:
        context.current().cleanup.callback(ticket.leave)
    return entered


class Reserved:
    """``tokens`` that a request is charged for and has neither drawn nor read so far. The key gets back those that are
    left at the end of the request."""

    def __init__(self, request: Request) -> None:
        self._rate = rate_of(request)
        self._charged = 0.0
        self.tokens = 0

    async def charge(self, used: int, tokens: int, param: str | None = None) -> None:
        """Count ``used`` tokens, which stay counted, and at most ``tokens`` that the request still uses.

        Raises:
            ApiError: 429 or 400, from ``TokenRate.charge``.
        """
        await self._rate.charge(used + tokens, param)
        self.tokens, self._charged, current = tokens, time.monotonic(), context.current()
        current.cleanup.callback(self._give_back, current.tenant)

    async def settle(self) -> None:
        """Give back what is left. The headers of the answer count it if that takes no time, as it nearly always does.

        It goes on where the request is cancelled.
        """
        giving = self._give_back(context.current().tenant)
        if giving is not None:
            done, _ = await asyncio.wait({giving}, timeout=SOON_S)
            if done:
                await self._rate.tell()

    def _give_back(self, tenant: str) -> asyncio.Task[None] | None:
        tokens, self.tokens = self.tokens, 0
        if tokens <= 0 or self._rate.most == sys.maxsize:
            return None
        return _go_on(self._rate.give_back(tokens, tenant, time.monotonic() - self._charged))


_giving = set[asyncio.Task[None]]()
"""Tasks at work. The event loop keeps no task alive."""


def _go_on(giving: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Give tokens back beside what runs now."""
    task = asyncio.get_running_loop().create_task(giving)
    _giving.add(task)
    task.add_done_callback(_giving.discard)
    return task


def set_deadline(timeout_s: float | None, settings: Settings) -> None:
    """Let the current request take ``timeout_s`` seconds, counted from its arrival.

    Raises:
        ApiError: 400 when that is more than the server allows.
    """
    if timeout_s is None:
        return
    if timeout_s > settings.max_timeout_s:
        raise bad_request(f"timeout_s: at most {settings.max_timeout_s:g} on this server", "timeout_s")
    context.current().allow(timeout_s)


def log_prompts(request: Request, prompts: Sequence[str | list[int]]) -> None:
    """Log the prompts if the setting ``log_prompts`` is on."""
    settings: Settings = request.app.state.settings
    if settings.log_prompts:
        log.info("prompts", prompts=prompts)
