"""A function in a child process: it can be killed, and it holds no lock here. Its memory is bounded and returned.

A fork server that has imported ``PRELOAD`` forks one process per call, within milliseconds after its own start.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

PRELOAD = ["service.reports.forms", "service.models.text.grammar_text"]
"""Modules that the fork server imports once for all children."""

NICE = 10
"""Priority of work without a token stream."""

MEMORY_BYTES = 2 << 30
"""Most bytes that one child may allocate, where the system can limit it."""

TRIES = 3
"""Starts of one child."""

PAUSE_S = 0.1
"""Seconds between them: a fork server that was killed seems alive until the system has ended it."""


class ChildFailed(RuntimeError):
    """The function raised, or its process died; the message says which."""


class Child:
    """One call of ``function(*args)`` in a process. The function is importable, its arguments and value pickle."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._call = function, args
        self._lock = threading.Lock()
        self._process: Any = None
        self._killed = False

    def run(self) -> Any:
        """The function's value. Blocks.

        Raises:
            ChildFailed: when it raised an exception, was killed, or ran out of memory.
        """
        context = _context()
        mine, theirs = context.Pipe(duplex=False)
        with mine:
            with theirs, self._lock:
                if self._killed:
                    raise ChildFailed("killed before it began")
                self._process = _started(context, theirs, *self._call)
            try:
                kind, value = pickle.loads(mine.recv_bytes())
            except (EOFError, OSError):  # before its answer, or in the middle of it
                kind, value = "died", "its process was killed, or ran out of memory"
            self._process.join()
            self._process.close()
        if kind != "value":
            raise ChildFailed(value)
        return value

    def kill(self) -> None:
        """End it now. From any thread; safe to repeat."""
        with self._lock:
            self._killed = True
            with suppress(ValueError):  # closed: it has ended
                if self._process is not None:
                    self._process.kill()


def _started(context: Any, *args: Any) -> Any:
    """The process of a call. A fork server that dies meanwhile fails the start, and the next one has another."""
    for again in reversed(range(TRIES)):
        process = context.Process(target=_serve, args=args, daemon=True)
        try:
            with _no_main_module():
                process.start()
        except (EOFError, ConnectionError):
            if not again:
                raise
            time.sleep(PAUSE_S)
        else:
            break
    return process


@contextmanager
def _no_main_module() -> Iterator[None]:
    """multiprocessing imports the main module in every child, to find functions there. Ours are elsewhere, and a
    script without a guard would run again."""
    with _main_module:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


_main_module = threading.Lock()
"""Held while another one is in its place: several threads start children."""


def _context() -> Any:
    name = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(name)
    if name == "forkserver":
        context.set_forkserver_preload(PRELOAD)
    return context


def _serve(answers: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """In the child: one answer, (kind, value)."""
    gc.freeze()  # looking for garbage among the fork server's objects copies their pages, half of a picture's time
    _stay_small()
    try:
        answer = "value", function(*args)
        data = pickle.dumps(answer)
    except MemoryError:
        data = pickle.dumps(("failed", f"it needs more than {MEMORY_BYTES >> 20} MB of memory"))
    except Exception:
        data = pickle.dumps(("failed", traceback.format_exc()))
    with suppress(BrokenPipeError):
        answers.send_bytes(data)


def yield_to_others() -> None:
    """From here on, this thread takes the processor only where threads of ordinary priority leave it."""
    if sys.platform == "linux":  # elsewhere a priority is a whole process's
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def _stay_small() -> None:
    """Yield to the server's own threads, and stop short of the machine's memory."""
    yield_to_others()
    try:
        import resource
    except ImportError:  # Windows
        return
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
