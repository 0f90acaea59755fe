"""Generation threads on a CPU: the OpenMP threads and the memory that they keep, and their smallest numbers.

Each thread keeps OpenMP threads from its first large operation on. Once all of them are more than the cores, libgomp
makes every one sleep between two operations. Waking them takes longer than small operations do, on several threads. So
with several models, a generation thread without work ends its own.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from service.machine import heap

TRIM_AFTER_S = 10.0
"""Seconds without work after which a generation thread gives free memory back: glibc keeps what steps needed."""

SOFT = 1
"""omp_pause_soft, OpenMP 5.0, section 3.2.43: threads end, and settings stay."""

_every: set[Wake] = set()
"""Those of the generation threads that run."""
_lock = threading.Lock()


class Wake(threading.Event):
    """Wakes a generation thread. Waiting in vain ends the thread's OpenMP threads, if other generation threads have
    some, and later gives free memory back. ``keeps`` is true while it may have such threads."""

    def __init__(self) -> None:
        super().__init__()
        self.keeps, self._is_trimmed, self._worked_at = True, False, time.monotonic()

    def works(self) -> None:
        """Before the thread computes."""
        self.keeps, self._is_trimmed, self._worked_at = True, False, time.monotonic()

    @override
    def wait(self, timeout: float | None = None) -> bool:
        woken = super().wait(timeout)
        with _lock:
            ends = not woken and self.keeps and any(other.keeps for other in _every if other is not self)
            self.keeps = self.keeps and not ends
        if ends:
            end_openmp_threads()
        if not woken and not self._is_trimmed and time.monotonic() > self._worked_at + TRIM_AFTER_S:
            self._is_trimmed = True
            heap.trim()
        return woken


@contextmanager
def generation_thread(wake: Wake) -> Iterator[None]:
    """All that the thread of ``wake`` does. It computes with zero for float32 numbers under 1.2e-38, and so do the
    OpenMP threads that it starts.

    Under a bias such as ALiBi's, weights of far keys are so small. They add nothing to a sum, and Intel's processors
    take some hundred cycles for each.
    """
    torch.set_flush_denormal(True)
    with _lock:
        _every.add(wake)
    try:
        yield
    finally:
        with _lock:
            _every.discard(wake)
        torch.set_flush_denormal(False)


def end_openmp_threads() -> None:
    """End those of the calling thread. The next large operation starts them again, in 0.1 ms to some milliseconds."""
    if (library := _libgomp()) is not None:
        library.omp_pause_resource_all(SOFT)


@cache
def _libgomp() -> Any:
    """The libgomp that torch brings. Other OpenMP libraries do not count threads."""
    package = Path(torch.__file__).parent
    found = [*package.glob("lib/libgomp*.so*"), *package.parent.glob("torch.libs/libgomp*.so*")]
    library = ctypes.CDLL(str(found[0])) if found else None
    return library if hasattr(library, "omp_pause_resource_all") else None
