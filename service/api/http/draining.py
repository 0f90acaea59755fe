"""The end of service: new requests hear 503 while what runs may finish, then what is left is failed.

uvicorn alone closes its sockets at the signal. New clients of a load balancer would see refused connections. Running
answers would be cut at the end of the grace.
"""

from __future__ import annotations

import asyncio
import gc
import os
from _thread import start_new_thread
from socket import socket
from types import FrameType

import structlog
import uvicorn
from fastapi import FastAPI

from service import logs
from service.engine import FORCED

ANSWER_S = 2.0
"""Seconds that the answers of failed requests may take to be sent."""

log = structlog.get_logger()


GARBAGE = 10_000, 10, 10
"""When Python looks for garbage: fourteen times as rarely as by default, since each look stops every thread."""


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains ``app`` for ``grace_s`` seconds before it stops listening. A second signal
    stops it at once."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, grace_s: float) -> None:
        super().__init__(config)
        self._app, self._grace_s = app, grace_s

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Freeze the objects of a ready server: the garbage collector skips them, which saves 0.3 s per collection."""
        await super().startup(sockets)
        gc.freeze()
        gc.set_threshold(*GARBAGE)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A second signal, of whatever kind, ends the process now: a step that hangs must not hold it.

        The signal may interrupt this thread inside a log line, and only this thread can release the line's lock. So
        another thread logs; ``Thread.start`` takes a lock too, ``start_new_thread`` does not.
        """
        if self.should_exit:
            start_new_thread(self._stop_at_once, (FORCED + sig,))
        else:
            super().handle_exit(sig, frame)

    def _stop_at_once(self, exit_code: int) -> None:
        log.warning("stopped_at_once", in_flight=self._app.state.traffic.in_flight)
        logs.finish()
        os._exit(exit_code)

    async def main_loop(self) -> None:
        await super().main_loop()
        await self._drain()

    async def _drain(self) -> None:
        traffic = self._app.state.traffic
        traffic.drained.set()
        log.info("draining", in_flight=traffic.in_flight, grace_s=self._grace_s)
        await traffic.ends(self._grace_s)
        if traffic.in_flight:
            log.warning("drain_over", failed=traffic.in_flight)
        await asyncio.to_thread(self._app.state.models.stop)  # not on a thread that requests use
        await traffic.ends(ANSWER_S)
