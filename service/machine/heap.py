"""Memory that is free but not the system's: glibc keeps it for each thread that ever needed much."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""From malloc.h."""

KEPT = 1 << 30
"""Bytes of freed memory that stay in the process until ``trim``. Larger blocks are no part of the heap."""

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


def keep_one_heap() -> None:
    """Let all threads share one heap, before there are many, and let it keep what they free.

    By default glibc has eight heaps per processor, and each keeps what its threads once needed. Large blocks go
    back to the system each time, so the next operation finds their pages missing.
    """
    if (libc := _glibc()) is not None:
        for parameter, value in ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, KEPT), (M_TRIM_THRESHOLD, KEPT)):
            libc.mallopt(parameter, value)


@cache
def _glibc() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    try:
        libc = ctypes.CDLL(None)
        return libc if hasattr(libc, "malloc_trim") else None  # musl has none
    except OSError:
        return None
