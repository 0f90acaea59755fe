"""The switch of each thread: its forward computes with fused operations or with the model's own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Thread(threading.local):
    fuses = False


_thread = _Thread()


@contextmanager
def fusing(fuses: bool) -> Iterator[None]:
    """Within it, this thread computes fused operations if ``fuses``; then as before."""
    former, _thread.fuses = _thread.fuses, fuses
    try:
        yield
    finally:
        _thread.fuses = former


def is_fusing() -> bool:
    """False while gradients are enabled: the kernels have none."""
    return _thread.fuses and not torch.is_grad_enabled()
