"""The processes of a group: they start, find each other, and end together."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

from service.machine import cpus
from service.models.checkpoint.loading import ModelLoadError, device_of
from service.settings import Settings

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
"""Name of the loopback interface."""

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables of the interface that ranks listen on."""


def check(settings: Settings) -> None:
    """Refuse settings that a group does not follow.

    Raises:
        ModelLoadError: naming the setting.
    """
    size = settings.tensor_parallel
    if size == 1:
        return
    refused = {
        "ROPEWAY_QUANTIZATION": settings.quantization is not None,
        "ROPEWAY_ADAPTERS": bool(settings.adapters),
        "ROPEWAY_ATTENTION": settings.attention not in (None, "segments"),
        "ROPEWAY_CUDA_GRAPHS": bool(settings.cuda_graphs),
    }
    for name, given in refused.items():
        if given:
            raise ModelLoadError(f"{name}: not together with ROPEWAY_TENSOR_PARALLEL={size}")
    device, cards = device_of(settings), torch.cuda.device_count()
    if device.startswith("cuda") and (device != "cuda" or cards < size):
        raise ModelLoadError(f"ROPEWAY_TENSOR_PARALLEL: {size} ranks need {size} CUDA devices, and there are {cards}")
    if device == "cpu" and cards:
        raise ModelLoadError("ROPEWAY_TENSOR_PARALLEL: on a machine with CUDA, the ranks run there: set no device")
    if find_spec("accelerate") is None:
        raise ModelLoadError("ROPEWAY_TENSOR_PARALLEL: needs the package accelerate; install the extra `parallel`")
    if not dist.is_available():
        raise ModelLoadError("ROPEWAY_TENSOR_PARALLEL: this torch was built without torch.distributed")


@contextmanager
def joined(settings: Settings, rank: int, store: Path) -> Iterator[None]:
    """Within it, this process is a rank of a group on this machine. The ranks find each other by the file ``store``.

    Raises:
        ModelLoadError: when they do not in time.
    """
    size = settings.tensor_parallel
    # The file and the loopback interface: nobody else reaches the group.
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, **dict.fromkeys(INTERFACES, LOOPBACK)}
    former = {name: os.environ.get(name) for name in names}
    os.environ.update({name: str(value) for name, value in names.items()})
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, cpus.threads(settings.threads, threads) // size))
    backend, timeout = _backend(settings), timedelta(seconds=settings.stall_timeout_s)
    try:
        try:
            dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
        except Exception as error:
            raise ModelLoadError(f"ROPEWAY_TENSOR_PARALLEL: the ranks do not find each other: {error}") from error
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        torch.set_num_threads(threads)
        for name, value in former.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _backend(settings: Settings) -> str:
    return "nccl" if device_of(settings).startswith("cuda") else "gloo"
