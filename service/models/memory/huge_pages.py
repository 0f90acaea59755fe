"""Weights on a CPU in pages of 2 MiB, where Linux has them.

A product of few rows reads every weight once. With pages of 4 KiB, it often waits for an entry of the page table.
Weights of a safetensors file are the mapped file itself, where tensors begin at odd addresses.

Linux: https://docs.kernel.org/admin-guide/mm/transhuge.html
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import structlog
import torch
from torch import nn

from service.machine.heap import trim
from service.machine.memory import available_bytes

PAGE = 1 << 21
AREA = 1 << 28
"""Bytes of one allocation. The memory that it replaces is given back before the next one."""
LINE = 64
"""Bytes of a line of the processor's cache, to which weights are aligned."""
HUGEPAGE, COLLAPSE = 14, 25
"""``MADV_HUGEPAGE``, and ``MADV_COLLAPSE`` (Linux 6.1) for memory that is in small pages already."""

log = structlog.get_logger()


def move(model: nn.Module) -> None:
    """Copy the weights of a model on the CPU into huge pages. They keep their values and what they share.

    Without memory for another copy of an area, its weights and all others stay.
    """
    if not sys.platform.startswith("linux"):
        return
    shared: dict[Any, list[nn.Parameter]] = {}
    for weight in model.parameters():
        if _is_plain(weight):
            shared.setdefault((weight.data_ptr(), weight.shape, weight.dtype), []).append(weight)
    for area in _areas(list(shared.values())):
        size = sum(_aligned(weights[0].nbytes) for weights in area)
        if available_bytes() < 2 * size:
            log.warning("weights_in_small_pages", bytes=size)
            return
        _fill(area, size)


def advise(spans: Iterable[tuple[int, int]]) -> None:
    """Ask the kernel for huge pages at (address, bytes), and at what lies between on the same pages.

    A kernel without them refuses, which changes nothing. One call ends at the first page that cannot be huge, as where
    a mapped file begins. Then each half has a call. A call for each page would take ten times as long.
    """
    if not sys.platform.startswith("linux"):
        return
    joined: list[list[int]] = []
    for address, size in sorted(spans):
        start, stop = address // PAGE * PAGE, -(-(address + size) // PAGE) * PAGE
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], stop)
        else:
            joined.append([start, stop])
    libc = ctypes.CDLL(None)
    for advice in (HUGEPAGE, COLLAPSE):
        for start, stop in joined:
            _ask(libc, start, stop, advice)


def _ask(libc: ctypes.CDLL, start: int, stop: int, advice: int) -> None:
    """``madvise`` for the pages from ``start`` to ``stop``, and for each half of those that it refuses."""
    refused = libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), advice)
    if refused and stop - start > PAGE:
        middle = start + (stop - start) // PAGE // 2 * PAGE
        _ask(libc, start, middle, advice)
        _ask(libc, middle, stop, advice)


def _is_plain(weight: nn.Parameter) -> bool:
    """True for a tensor on the CPU that is nothing but its numbers."""
    data = weight.data
    is_plain = type(data) is torch.Tensor and data.device.type == "cpu" and data.layout == torch.strided
    return is_plain and data.is_contiguous() and data.nbytes > 0


def _areas(shared: list[list[nn.Parameter]]) -> Iterator[list[list[nn.Parameter]]]:
    """``shared`` weights in parts that fill an area each, or are larger alone."""
    area: list[list[nn.Parameter]] = []
    size = 0
    for weights in shared:
        if area and size + weights[0].nbytes > AREA:
            yield area
            area, size = [], 0
        area.append(weights)
        size += _aligned(weights[0].nbytes)
    if area:
        yield area


def _fill(area: list[list[nn.Parameter]], size: int) -> None:
    memory = torch.empty(size + PAGE, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % PAGE :][:size]
    advise([(memory.data_ptr(), size)])
    start = 0
    for weights in area:
        data = weights[0].data
        copy = memory[start : start + data.nbytes].view(data.dtype).view(data.shape).copy_(data)
        for weight in weights:
            weight.data = copy
        start += _aligned(data.nbytes)
    del data
    trim()


def _aligned(size: int) -> int:
    return -(-size // LINE) * LINE
