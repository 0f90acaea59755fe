"""The memory that this process may still take: the free memory of the machine, or less under a container's limit."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import torch

from service.machine.cpus import CGROUPS

FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""Limit, use, statistics, and the statistic of what is used and given up on demand."""


def available_bytes() -> int:
    """Bytes that can be taken without swapping or being killed."""
    return max(0, min([psutil.virtual_memory().available, *_left_in_container()]))


def free_bytes(device: torch.device) -> int:
    """Bytes for new tensors on ``device``, torch's reserved memory included."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return available_bytes()


def _left_in_container() -> Iterator[int]:
    for limit, used, statistics, reclaimable in FILES:
        try:
            most = (CGROUPS / limit).read_text().strip()
            if most != "max":
                lines = (line.split() for line in (CGROUPS / statistics).read_text().splitlines())
                given_up = dict(lines).get(reclaimable, "0")
                yield int(most) - int((CGROUPS / used).read_text()) + int(given_up)
        except (OSError, ValueError):  # no limit there
            continue
