"""Out of memory inside a step: recognised in errors of every library; memory is released before other work."""

from __future__ import annotations

import gc
import threading
import traceback
from contextlib import suppress

import torch

whole_card = threading.Lock()
"""Held during the capture of a CUDA graph, and by a thread that waits for the whole card. CUDA forbids it to wait while
another one captures."""

_PHRASES = ("out of memory", "can't allocate memory", "not enough memory")
"""Messages of CUDA libraries and of torch's CPU allocator in a plain RuntimeError."""


class OutOfMemory(RuntimeError):
    """A step of this request needed more memory than there was. ``alone``: nothing else held any, so the same
    request would fail again."""

    def __init__(self, during: str, *, alone: bool) -> None:
        super().__init__(f"out of memory during {during}")
        self.alone = alone


def is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in _PHRASES)


def give_back_after(error: BaseException | None) -> None:
    """``give_back``, also of what the functions hold through which ``error`` went, and the errors before it.

    A card that has failed for good gives nothing back.
    """
    waiting, seen = [error], set[int]()
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            waiting += [each.__cause__, each.__context__]
    with suppress(RuntimeError):
        give_back()


def give_back() -> None:
    """Return what is no longer referenced to the device. Call it outside of the except clause: the traceback
    holds the tensors of the failed step. Copies of its inputs have ended then."""
    gc.collect()
    if torch.cuda.is_available():
        with whole_card:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
