"""Streams of a card for engines, each for one engine only.

torch hands out 32 streams in turn, and then the first again. One engine may be capturing a graph on a stream. Kernels
that another engine runs on this stream would then become a part of the graph.
"""

from __future__ import annotations

import threading
import weakref

import torch

HANDED_OUT = 32
"""Streams of one priority that torch makes for a device."""

_in_use: set[tuple[torch.device, int]] = set()
_lock = threading.Lock()


def own_stream(owner: object, device: torch.device) -> torch.cuda.Stream:
    """A stream of ``device`` that no other living owner has.

    Raises:
        RuntimeError: when all have one.
    """
    with _lock:
        for _ in range(HANDED_OUT):
            stream = torch.cuda.Stream(device)
            key = (device, stream.cuda_stream)
            if key not in _in_use:
                _in_use.add(key)
                weakref.finalize(owner, _in_use.discard, key)
                return stream
    raise RuntimeError(f"all {HANDED_OUT} streams of {device} belong to engines: serve fewer models in one process")
