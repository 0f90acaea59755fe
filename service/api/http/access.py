"""API keys: access to the server, and the tenant of each request.

Only SHA-256 hashes are held. Keys are long and random (`ropeway keys new`), so a plain hash is enough: there is no
dictionary to try.
"""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Iterable
from pathlib import Path

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service import context
from service.api.errors import answer
from service.api.http.key_file import SHOWN, InvalidKeyFile, hash_of, read_hashes
from service.errors import ApiError
from service.sharing.limits import Concurrency, Connections, LimitsOutOfReach

OPEN = re.compile(r"(/v1)?/health(/.*)?|/metrics|/static/.*|/(ui(/.*)?)?")
"""Paths that need no key."""

DOCUMENTATION = re.compile(r"/docs(/.*)?|/openapi\.json")
"""Paths that need no key with ``open_docs``."""

UNCOUNTED = re.compile(r"GET /jobs/[^/]+/events|DELETE /jobs/[^/]+")
"""Requests beside the limit at a time: following a job costs nothing while it waits, and ending one makes room."""

BESIDE = 16
"""Uncounted requests of a key at a time for each that it may have: connections are shared with other keys."""

log = structlog.get_logger()


class ApiKeys:
    """The hashes of the environment and of the file, which is read again when it changes. A file that has become
    unusable is reported, and the keys stay as they were.

    Raises:
        InvalidKeyFile: at the start.
    """

    def __init__(self, hashes: Iterable[str], path: Path | None) -> None:
        self._fixed, self._path = tuple(hashes), path
        self.asked_for = bool(self._fixed) or path is not None
        self._version = self._seen()
        self._from_file = read_hashes(path) if path is not None else ()

    def tenant_of(self, presented: Iterable[str]) -> str | None:
        """The tenant of the valid key among ``presented``. Every pair is compared, in constant time."""
        self.reload_if_changed()
        found = None
        for key in presented:
            digest = hash_of(key)
            for known in (*self._fixed, *self._from_file):
                if hmac.compare_digest(digest, known):
                    found = known[:SHOWN]
        return found

    def tenants(self) -> frozenset[str] | None:
        """The tenants of all valid keys; None where no key is asked for."""
        if not self.asked_for:
            return None
        self.reload_if_changed()
        return frozenset(known[:SHOWN] for known in (*self._fixed, *self._from_file))

    def has(self, tenant: str) -> bool:
        """True while the key of ``tenant`` is valid, and where no key is asked for."""
        tenants = self.tenants()
        return tenants is None or tenant in tenants

    def reload_if_changed(self) -> None:
        version = self._seen()
        if self._path is None or version == self._version:
            return
        try:
            self._from_file = read_hashes(self._path)
            log.info("api_keys_read", keys=len(self._from_file))
        except InvalidKeyFile as error:
            log.error("api_keys_kept", error=str(error))
        self._version = version  # last: another thread would go by the keys from before

    def _seen(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(self._path) if self._path is not None else None
        except OSError:
            return None
        return status and (status.st_mtime_ns, status.st_size, status.st_ino)


class AccessControl:
    """Answers 401 without a valid key, and 429 to more requests of one key at a time than it may have.

    Keys share ``connections``. Without keys nothing distinguishes the clients.
    """

    def __init__(
        self, app: ASGIApp, keys: ApiKeys, concurrency: Concurrency, connections: Connections, open_docs: bool = False
    ) -> None:
        self.app, self._keys, self._concurrency, self._open_docs = app, keys, concurrency, open_docs
        self._connections = connections
        most = None if concurrency.most is None else BESIDE * concurrency.most
        self._beside = Concurrency(most, "jobs followed or cancelled")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_open(scope["path"]):
            await self.app(scope, receive, send)
            return
        if self._keys.asked_for:
            tenant = self._keys.tenant_of(_presented(Headers(scope=scope)))
            if tenant is None:
                await answer(unauthorized())(scope, receive, send)
                return
            context.current().tenant = tenant
            structlog.contextvars.bind_contextvars(tenant=tenant)
        beside = UNCOUNTED.fullmatch(f"{scope['method']} {scope['path']}")
        limits = [self._beside if beside else self._concurrency]
        if self._keys.asked_for and scope["method"] != "DELETE":  # cancelling makes room
            limits.append(self._connections)
        await self._counted(limits, scope, receive, send)

    async def _counted(self, limits: list[Concurrency], scope: Scope, receive: Receive, send: Send) -> None:
        """Answer while the request has a place in each of ``limits``."""
        if not limits:
            await self.app(scope, receive, send)
            return
        limit, tenant = limits.pop(), context.current().tenant
        try:
            place = await limit.enter(tenant)
        except LimitsOutOfReach as error:
            await answer(error)(scope, receive, send)
            return
        if place is None:
            await answer(ApiError(429, limit.refusal(tenant), code="too_many_requests"))(scope, receive, send)
            return
        try:
            await self._counted(limits, scope, receive, send)
        finally:
            await limit.leave(tenant, place)

    def _is_open(self, path: str) -> bool:
        return bool(OPEN.fullmatch(path) or (self._open_docs and DOCUMENTATION.fullmatch(path)))


def _presented(headers: Headers) -> list[str]:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    keys = [token.strip()] if scheme.lower() == "bearer" else []
    return [key for key in (*keys, headers.get("x-api-key", "")) if key]


def unauthorized() -> ApiError:
    message = "no valid API key: send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`"
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
