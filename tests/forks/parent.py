"""The parent: ``python -m tests.forks.parent FOLDER`` listens on two sockets there, until its standard input ends.

It loads the libraries of a server, and forks once. One half forks servers. The other one loads the libraries of the
tests too and forks test workers.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import pickle
import selectors
import shutil
import signal
import socket
import sys
import warnings
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from tests.forks import python

SERVERS, WORKERS = "servers", "workers"
"""Names of the two sockets."""

OF_SERVERS = ("service.app", "service.cli.commands")
OF_WORKERS = ("service.reports.forms", "schemathesis", "playwright.sync_api", "alembic", "psycopg", "openai", "peft")
"""Libraries, not files of the tests: pytest rewrites their assertions when it imports them."""


class Order(NamedTuple):
    """A call in a new process. Its standard input, output and errors come beside the order, and more descriptors."""

    folder: str
    environment: Mapping[str, str]
    call: bytes
    """A function and its arguments, pickled."""


def send(connection: socket.socket, order: Order, streams: tuple[int, ...]) -> None:
    data = pickle.dumps(order)
    socket.send_fds(connection, [number(len(data))], streams)
    connection.sendall(data)


def _received(connection: socket.socket) -> tuple[Order, list[int]]:
    size, streams, _, _ = socket.recv_fds(connection, 8, 5)
    data = bytearray()
    while len(data) < number_of(size):
        data += connection.recv(1 << 20)
    return pickle.loads(data), streams


def number(value: int) -> bytes:
    return value.to_bytes(8, signed=True)


def number_of(data: bytes) -> int:
    return int.from_bytes(data, signed=True)


def _load(names: tuple[str, ...]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as in a worker that imports them itself
        warnings.filterwarnings("ignore", "invalid escape sequence")
        for name in names:
            import_module(name)


def _fork_until_the_end(listener: socket.socket) -> None:
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    events = selectors.DefaultSelector()
    events.register(listener, selectors.EVENT_READ)
    events.register(sys.stdin, selectors.EVENT_READ)
    while all(ready.fileobj is listener for ready, _ in events.select()):
        connection = listener.accept()[0]
        if not os.fork():
            listener.close()
            _keep(connection)
        connection.close()


def _keep(connection: socket.socket) -> None:
    """Fork the process, send its number and, when it has ended, its exit code. Never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    order, streams = _received(connection)
    child = os.fork()
    if not child:
        connection.close()
        _become(order, streams)
    for stream in streams:
        os.close(stream)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)  # a pipe ends when nothing can write to it
    code = 1
    try:
        connection.sendall(number(child))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        connection.sendall(number(code))
    finally:
        os._exit(0 if code == 0 else 1)


def _become(order: Order, streams: list[int]) -> None:
    """Never returns: the interpreter ends as after any script, with its threads and exit handlers."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for target, source in enumerate(streams):  # sources have larger numbers than all targets
        os.dup2(source, target)
        os.close(source)
    # The parent's own knows whether the parent's file has a position.
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - for the whole process
    if "triton" in sys.modules:
        atexit.register(gc.unfreeze)  # Triton 3.9 lists frozen objects as leaks
    sys.modules["__main__"] = ModuleType("__main__")  # children of multiprocessing import the main module
    os.chdir(order.folder)
    os.environ.clear()
    os.environ.update(order.environment)
    function, arguments = pickle.loads(order.call)
    sys.exit(function(*arguments))


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    unfinished = path.with_suffix(".part")
    listener.bind(str(unfinished))
    listener.listen(64)
    unfinished.rename(path)
    return listener


def list_modules() -> None:
    """Print the modules that a server loads before its settings are known."""
    print(*sys.modules)


def main(folder: Path) -> None:
    multiprocessing.set_executable(str(python.written(folder)))
    _load(OF_SERVERS)
    if not os.fork():
        from huggingface_hub import constants

        import tests.forks.command
        import tests.service.serving  # noqa: F401 - both have the functions that servers begin with

        constants.HF_HUB_OFFLINE = True
        _fork_until_the_end(_listen(folder / SERVERS))
    else:
        _load(OF_WORKERS)
        _fork_until_the_end(_listen(folder / WORKERS))
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
