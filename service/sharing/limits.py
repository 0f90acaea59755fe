"""Limits per API key: in this process, or in a Redis or Valkey server that several replicas share."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import structlog
from limits.aio.storage import MemoryStorage, RedisStorage, Storage
from limits.errors import StorageError

from service.sharing.admission import in_share

if TYPE_CHECKING:
    from redis.asyncio import Redis

SCHEMES = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss"}
"""Schemes of a URL, and what the client library calls them."""

TIMEOUT_S = 2.0
"""Seconds that a request waits for the shared store."""

RETRY_S = 1.0
"""Seconds between attempts to give places or tokens back after an outage of the store."""

MOST_LOST = 10_000
"""Most places that wait for it; more expire."""

ENTER = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[2]) then return 0 end
redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[1])
redis.call('PEXPIRE', KEYS[1], math.ceil(ARGV[3] * 1000))
return 1
"""
"""Add the request ARGV[1] to the running ones at KEYS[1], unless these are ARGV[2]; it expires in ARGV[3] seconds."""

RENEW = """
local time = redis.call('TIME')
redis.call('ZADD', KEYS[1], time[1] + time[2] / 1000000 + ARGV[2], ARGV[1])
redis.call('PEXPIRE', KEYS[1], math.ceil(ARGV[2] * 1000))
"""
"""Let the running request ARGV[1] at KEYS[1] expire in ARGV[2] seconds. A store that was emptied gets it back."""

log = structlog.get_logger()


class LimitsOutOfReach(RuntimeError):
    """The shared store of limits does not answer; the same request may work later."""


class LimitsUnusable(RuntimeError):
    """The server cannot start with this shared store of limits; the message says why."""


class SharedLimits:
    """Limits in the Redis or Valkey server at ``url``."""

    def __init__(self, url: str) -> None:
        """Raises:
        LimitsUnusable: when the URL is none of such a server, or the client library is not installed.
        """
        try:
            parts = urlsplit(url)
            port = parts.port or 6379
        except ValueError:  # whose message may have a part of the password
            raise LimitsUnusable("ROPEWAY_SHARED_URL: redis://HOST:PORT, with a port below 65536") from None
        if parts.scheme not in SCHEMES:
            raise LimitsUnusable(f"ROPEWAY_SHARED_URL: redis://HOST:PORT or one of {', '.join(SCHEMES)}")
        try:
            from redis.asyncio import ConnectionPool, Redis
        except ImportError:
            raise LimitsUnusable("ROPEWAY_SHARED_URL: it needs the package redis (the extra `shared`)") from None
        self.shown = f"{parts.scheme}://{parts.hostname}:{port}"
        url = parts._replace(scheme=SCHEMES[parts.scheme]).geturl()
        pool = ConnectionPool.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
        self.client: Redis = Redis.from_pool(pool)
        self.storage: Storage = RedisStorage(
            f"async+{url}",
            wrap_exceptions=True,
            implementation="redispy",
            key_prefix="ropeway",
            connection_pool=pool,  # type: ignore[arg-type]  # documented, and missing in its types
        )

    async def check(self) -> None:
        """Raises:
        LimitsUnusable: when the server does not answer.
        """
        if not await self.storage.check():
            raise LimitsUnusable(f"ROPEWAY_SHARED_URL: the shared store of limits at {self.shown} does not answer")

    async def close(self) -> None:
        await self.client.aclose()


@asynccontextmanager
async def opened(shared: SharedLimits | None) -> AsyncIterator[None]:
    """Inside, the store is in use; it is closed at the end.

    Raises:
        LimitsUnusable: when the store does not answer.
    """
    if shared is None:
        yield
        return
    try:
        await shared.check()
        yield
    finally:
        await shared.close()


@asynccontextmanager
async def reached() -> AsyncIterator[None]:
    """Inside, the failures of a store are one exception.

    Raises:
        LimitsOutOfReach: when the store does not answer.
    """
    try:
        async with asyncio.timeout(2 * TIMEOUT_S):
            yield
    except StorageError as error:
        raise LimitsOutOfReach(str(error.storage_error)) from error
    except (OSError, TimeoutError) as error:
        raise LimitsOutOfReach(str(error) or "no answer") from error
    except Exception as error:
        if type(error).__module__ != "redis.exceptions":  # the library is optional
            raise
        raise LimitsOutOfReach(str(error)) from error


def storage_of(shared: SharedLimits | None) -> Storage:
    """The storage that counts rates."""
    return MemoryStorage() if shared is None else shared.storage


class Concurrency:
    """Running requests of each tenant in this process; ``most`` of one tenant, or any number.

    ``kind`` names them in refusals.
    """

    def __init__(self, most: int | None, kind: str = "requests running") -> None:
        self.most, self._kind = most, kind
        self._running: Counter[str] = Counter()

    async def enter(self, tenant: str) -> str | None:
        """A place among the running requests, None when all are taken.

        Raises:
            LimitsOutOfReach: when a shared store does not answer.
        """
        if not self._has_room(tenant):
            return None
        self._running[tenant] += 1
        return tenant

    def _has_room(self, tenant: str) -> bool:
        return self.most is None or self._running[tenant] < self.most

    def refusal(self, tenant: str) -> str:
        """The reason why ``tenant`` found no place."""
        return f"this API key has {self.most} {self._kind}, the most it may have"

    async def leave(self, tenant: str, place: str) -> None:
        """Give a place back."""
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]


class Connections(Concurrency):
    """Connections on which each tenant has a request, of ``capacity`` in this process.

    No tenant takes those of the others: thresholds are those of ``service.sharing.admission``.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(None)
        self._capacity = capacity

    def _has_room(self, tenant: str) -> bool:
        return in_share(self._running[tenant], 1, self._running.total(), self._capacity)

    def refusal(self, tenant: str) -> str:
        held = self._running[tenant]
        return f"this API key has requests on {held} of {self._capacity} connections, the most it may have now"


class SharedConcurrency(Concurrency):
    """Running requests of each tenant on all replicas. The places of a lost replica expire after ``lease_s``."""

    def __init__(self, most: int, shared: SharedLimits, lease_s: float) -> None:
        super().__init__(most)
        self._client, self._lease_s = shared.client, lease_s
        self._enter, self._renew = self._client.register_script(ENTER), self._client.register_script(RENEW)
        self._places: dict[str, str] = {}
        self._lost: dict[str, str] = {}
        self._renewing: asyncio.Task[None] | None = None
        self._returning: asyncio.Task[None] | None = None

    async def enter(self, tenant: str) -> str | None:
        place = uuid.uuid4().hex
        try:
            async with reached():
                granted = await self._enter(keys=[_key(tenant)], args=[place, self.most or 0, self._lease_s])
        except BaseException:  # a client that leaves, too: the store may grant the place afterwards
            self._give_back_later(tenant, place)
            raise
        if not granted:
            return None
        self._places[place] = tenant
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew_all())
        return place

    async def leave(self, tenant: str, place: str) -> None:
        del self._places[place]
        if not self._places and self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None
        try:
            async with reached():
                await self._client.zrem(_key(tenant), place)
        except LimitsOutOfReach:
            self._give_back_later(tenant, place)

    def _give_back_later(self, tenant: str, place: str) -> None:
        if len(self._lost) < MOST_LOST:
            self._lost[place] = tenant
        if self._returning is None or self._returning.done():
            self._returning = asyncio.create_task(self._give_back())

    async def _give_back(self) -> None:
        """Remove the lost places once the store answers. It runs what it was sent while it was frozen."""
        while self._lost:
            await asyncio.sleep(RETRY_S)
            lost = dict(self._lost)
            with suppress(LimitsOutOfReach):
                for tenant in set(lost.values()):
                    places = [place for place, owner in lost.items() if owner == tenant]
                    async with reached():
                        await self._client.zrem(_key(tenant), *places)
                    for place in places:
                        del self._lost[place]

    async def _renew_all(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            try:
                for place, tenant in list(self._places.items()):
                    await self._renewed(place, tenant)
            except LimitsOutOfReach as error:
                log.warning("limits_out_of_reach", error=str(error))

    async def _renewed(self, place: str, tenant: str) -> None:
        """Renew a place, unless its request has ended meanwhile."""
        if place not in self._places:
            return
        try:
            async with reached():
                await self._renew(keys=[_key(tenant)], args=[place, self._lease_s])
        finally:
            if place not in self._places:  # the store may have renewed it after it was given back
                self._give_back_later(tenant, place)


def _key(tenant: str) -> str:
    return f"ropeway/running/{tenant}"
