"""Measurement of many types, each in a child process: one that hangs or crashes costs its own row only."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch

from service.sharing.child import PRELOAD, Child, ChildFailed
from tests.field.measurement import Row, measure

LIMIT_S = 240.0
"""Wall time of one type, some hundred times what it takes on an idle machine."""

Measure = Callable[[str], Row]


def rows(
    names: Iterable[str], *, processes: int, limit_s: float = LIMIT_S, measure: Measure = measure
) -> Iterator[Row]:
    """The row of each name as it is measured, ``processes`` at a time, not in order."""
    if measure.__module__ not in PRELOAD:
        PRELOAD.append(measure.__module__)
    with ThreadPoolExecutor(processes) as threads:
        for done in as_completed(threads.submit(_row, measure, name, limit_s) for name in names):
            yield done.result()


def _row(measure: Measure, name: str, limit_s: float) -> Row:
    child = Child(_silently, measure, name)
    timer = threading.Timer(limit_s, child.kill)
    timer.start()
    try:
        row: Row = child.run()
    except ChildFailed as error:
        reason = str(error).strip().splitlines()[-1] if timer.is_alive() else f"no result within {limit_s:g} s"
        return Row(name, "wrong", reason)
    finally:
        timer.cancel()
    return row


def _silently(measure: Measure, name: str) -> Row:
    """In the child: messages and bars of transformers would break the parent's own bar."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    torch.set_num_threads(1)
    gc.freeze()  # engines collect garbage when they stop
    return measure(name)
