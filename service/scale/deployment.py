"""The application as a Ray Serve ingress: one replica is one process with its event loop, models and engines."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import structlog
from ray import serve

from service.engine import SWITCH_S
from service.scale import options, private_names
from service.scale.autoscaling import JOBS
from service.scale.cluster import settings_on_node
from service.scale.reasons import NotStarted
from service.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

    from service.api.http.scope import Traffic

POLL_S = 0.1
"""Seconds between looks at whether Serve stops this replica."""

LATE_S = 1.0
"""Seconds without a request after which none is on its way any more."""

COUNT_S = 5.0
"""Seconds that the number of unfinished jobs may take."""

log = structlog.get_logger()


class NotServing(RuntimeError):
    """A replica that would answer 503 to its probe; Serve replaces it when this repeats."""


class Ropeway:
    """One replica. Serve calls ``__serve_build_asgi_app__`` once in its process, and ``check_health`` from time to
    time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._app: FastAPI | None = None
        self._refusal: NotStarted | None = None

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The same application as without Ray, built here: models do not travel between processes."""
        from service import logs
        from service.machine.heap import keep_one_heap

        private_names.require_names()
        keep_one_heap()
        sys.setswitchinterval(SWITCH_S)
        logs.quiet_imports()
        from service.app import create_app

        logs.write_in_background()
        logs.configure(self._settings.log_level, self._settings.log_format)
        try:
            app = create_app(self._settings)
        except Exception as error:
            raise self._not_started(error) from None
        lifespan = _draining(app.router.lifespan_context, self._settings.shutdown_grace_s)
        app.router.lifespan_context = self._without_failure(lifespan)
        self._app = app
        return app

    def _without_failure(self, lifespan: Any) -> Any:
        """``lifespan``, which keeps the error of its start for ``check_health``. Serve would drop its reason. Before it
        sends requests, it asks for the health."""

        @asynccontextmanager
        async def kept(app: FastAPI) -> AsyncIterator[None]:
            async with AsyncExitStack() as stack:
                try:
                    await stack.enter_async_context(lifespan(app))
                except Exception as error:
                    self._refusal = self._not_started(error)
                yield

        return kept

    def _not_started(self, error: Exception) -> NotStarted:
        from service.app import failure

        message = " ".join(failure(error).split())
        if self._settings.log_level == "debug":
            log.critical("start_failed", error=message, exc_info=error)
        return NotStarted(message)

    async def check_health(self) -> None:
        """Raises:
        NotStarted: with the reason of a failed start; NotServing: where /health/ready would answer 503.
        """
        from service.api.health import not_ready

        if self._refusal is not None:
            raise self._refusal
        if self._app is None or not hasattr(self._app.state, "models") or self._app.state.traffic.draining:
            return
        refusal = not_ready(self._app)
        if refusal is not None:
            raise NotServing(refusal.message)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve asks for this with autoscaling, and gives it to ``autoscaling.by_work``.

        Raises:
            StoreOutOfReach: without an answer of the database; Serve then keeps the last number.
        """
        state = self._app.state if self._app is not None else None
        if state is None or not hasattr(state, "jobs"):
            return {JOBS: 0}
        return {JOBS: await state.store_calls.within(COUNT_S, state.jobs.unfinished, state.keys.tenants())}


def _draining(lifespan: Any, grace_s: float) -> Any:
    """``lifespan`` with a watch over the end of the replica."""

    @asynccontextmanager
    async def watched(app: FastAPI) -> AsyncIterator[None]:
        from service.machine.heap import frozen

        async with lifespan(app):
            with frozen():
                watch = asyncio.create_task(_drain_at_the_end(app, grace_s))
                try:
                    yield
                finally:
                    watch.cancel()
                    with suppress(asyncio.CancelledError):
                        await watch

    return watched


async def _drain_at_the_end(app: FastAPI, grace_s: float) -> None:
    """Wait until Serve stops this replica, then fail what is left at the end of the grace.

    Serve sends no new requests to a replica that stops, but some are on their way. They are served, and refused with
    503 once the grace is over. Serve itself would cut streams without a word.
    """
    while not private_names.is_stopping():
        await asyncio.sleep(POLL_S)
    traffic = app.state.traffic
    log.info("draining", in_flight=traffic.in_flight, grace_s=grace_s)
    await _quiet(traffic, grace_s)
    if traffic.in_flight:
        log.warning("drain_over", failed=traffic.in_flight)
    traffic.drained.set()
    await asyncio.to_thread(app.state.models.stop)
    await traffic.ends(options.FAILING_S)


async def _quiet(traffic: Traffic, grace_s: float) -> None:
    """Wait until nothing has been in flight for ``LATE_S``, at most ``grace_s``."""
    last = time.monotonic()
    until = last + grace_s
    while (now := time.monotonic()) < min(until, last + LATE_S):
        if traffic.in_flight:
            last = now
        await asyncio.sleep(0.02)


def bound(settings: Settings, deployment: dict[str, Any]) -> Any:
    """The application for ``serve.run``, with ``deployment`` from ``options.deployment``."""
    return serve.deployment(**deployment)(serve.ingress()(Ropeway)).bind(settings)


def build(args: dict[str, Any]) -> Any:
    """The application of a cluster's configuration, which has the options of the deployment; Serve calls this on a node
    with the ``settings`` among ``args``.

    Raises:
        InvalidScale: for settings that a cluster cannot follow.
    """
    return bound(settings_on_node(args["settings"]), {"name": options.NAME})
