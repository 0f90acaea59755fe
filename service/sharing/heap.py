"""Memory that is free but not the system's: glibc keeps it for each thread that ever needed much."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

M_ARENA_MAX = -8
"""From malloc.h."""

_entered: list[None] = []
"""One entry for each ``frozen`` that has not ended."""


def trim() -> None:
    """Give free memory back to the system, where its C library can. Takes some milliseconds, without the lock."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


@contextmanager
def frozen() -> Iterator[None]:
    """Inside, Python looks for no garbage among what there is now: 0.3 s a time with all libraries imported. Inside
    of another one it does nothing."""
    outermost = not _entered and not gc.get_freeze_count()  # the count visits every frozen object
    _entered.append(None)
    if outermost:
        gc.freeze()
    try:
        yield
    finally:
        _entered.pop()
        if outermost:
            gc.unfreeze()


def share_arenas() -> None:
    """Let all threads share two heaps, before there are many. By default glibc has eight per processor, and each keeps
    what its threads once needed."""
    if (libc := _glibc()) is not None:
        libc.mallopt(M_ARENA_MAX, 2)


@cache
def _glibc() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    try:
        libc = ctypes.CDLL(None)
        return libc if hasattr(libc, "malloc_trim") else None  # musl has none
    except OSError:
        return None
