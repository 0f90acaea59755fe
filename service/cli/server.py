"""The server inside this process: in the foreground for ``serve``, on a free loopback port for other commands."""

from __future__ import annotations

import gc
import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from service import logs
from service.env_file import UnreadableFile
from service.environment import misspelt, unknown
from service.machine.heap import frozen
from service.settings import Settings

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


class StartFailed(Exception):
    """The server cannot start; the message has the reason."""


class StartWatch:
    """Passes everything to ``app`` and records the exception of a failed start, which is reported once."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.error: Exception | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without_traceback(message: Message) -> None:
            await send({"type": message["type"]} if message["type"] == "lifespan.startup.failed" else message)

        if scope["type"] != "lifespan":
            await self.app(scope, receive, send)
            return
        try:
            await self.app(scope, receive, send_without_traceback)
        except Exception as error:
            self.error = error
            raise


def settings_with(**given: Any) -> Settings:
    """Settings from the environment; ``given`` takes precedence.

    Raises:
        StartFailed: naming every setting that is out of range, and every misspelt one, or the file that is no text.
    """
    try:
        if slips := misspelt(unknown()):
            raise StartFailed("; ".join(slips))
        return Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        problems = [
            f"ROPEWAY_{'.'.join(map(str, e['loc'])).upper()}: {e['msg'].removeprefix('Value error, ')}"
            for e in error.errors()
        ]
        raise StartFailed("; ".join(problems)) from None
    except UnreadableFile as error:
        raise StartFailed(str(error)) from None


def load_libraries() -> None:
    """Import the server without garbage collection: objects made at import stay, and scanning them takes a sixth of the
    time."""
    if "service.app" in sys.modules:
        return
    logs.quiet_imports()
    gc.disable()
    try:
        import_module("service.app")
    finally:
        gc.enable()


@contextmanager
def local_server(settings: Settings) -> Iterator[str]:
    """Base URL of a quiet server on a free loopback port, ready; stopped on exit.

    Raises:
        StartFailed: when it cannot start.
    """
    load_libraries()
    import uvicorn

    from service.api.http.connections import connection_options
    from service.app import REFUSALS, create_app, failure

    logs.configure("error")
    # They warn that the manager stopped before its first request, which is normal in a shell command.
    for name in ("transformers", "ContinuousBatchingLogger"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        app = StartWatch(create_app(settings))
    except REFUSALS as error:
        raise StartFailed(str(error)) from None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        quiet: dict[str, Any] = {"log_config": None, "log_level": "critical", "access_log": False}
        config = uvicorn.Config(app, lifespan="on", **quiet, **connection_options(settings))
        server = uvicorn.Server(config)

        def run() -> None:
            with suppress(SystemExit):  # uvicorn exits when the app cannot start
                server.run(sockets=[listener])

        thread = threading.Thread(target=run, name="ropeway-server")
        thread.start()
        with ExitStack() as until_it_has_stopped:
            try:
                while not server.started:
                    if not thread.is_alive():
                        raise StartFailed(failure(app.error))
                    time.sleep(0.02)
                until_it_has_stopped.enter_context(frozen())  # transformers collects garbage when an engine stops
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True
                thread.join()
