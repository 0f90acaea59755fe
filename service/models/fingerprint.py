"""A model's fingerprint: what its outcomes depend on beside the inputs, the encoding and our code.

It is taken once, at load and before the first forward: transformers changes configurations while it runs.
"""

from __future__ import annotations

import hashlib
import json
import platform
from importlib import metadata
from typing import Any

import torch

UNRELATED = {"_name_or_path", "transformers_version"}
"""Keys of a configuration that say where a model came from and not what it is."""

BLOCK = 1 << 20
"""Numbers of a tensor that are summed at a time."""


def fingerprint(model: Any) -> str:
    """SHA-256 in hex of a model's contents and of the numerics it runs with."""
    return _digest([contents(model), numerics(model)])


def contents(model: Any) -> str:
    """A hash that differs for models that differ: configuration, and sums over every parameter and buffer, weighted
    by place so that swapped rows show."""
    config = {
        name: value for name, value in model.config.to_dict().items() if name not in UNRELATED and not callable(value)
    }
    tensors = [*model.named_parameters(), *model.named_buffers()]
    text = json.dumps(config, sort_keys=True, default=str)
    return _digest([text, [[name, list(t.shape), str(t.dtype), _sums(t)] for name, t in tensors]])


def _sums(tensor: torch.Tensor) -> list[list[float]]:
    """Sum, sum of magnitudes and sum weighted by place of every block, then the first 64 values; all in float64."""
    tensor = tensor.detach()
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten()
    places = torch.arange(1, min(BLOCK, len(flat)) + 1, dtype=torch.float64, device=flat.device) / BLOCK
    sums = []
    for block in flat.split(BLOCK):
        values = block.double()
        sums.append(torch.stack((values.sum(), values.abs().sum(), (values * places[: len(values)]).sum())).tolist())
    return [*sums, flat[:64].double().tolist()]


def numerics(model: Any) -> list[Any]:
    """Causes of rounding beside the code: versions, hardware, number format, threads."""
    device, dtype = model.device, str(model.dtype)
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        hardware = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    versions = [torch.__version__, metadata.version("transformers")]
    return [versions, device.type, hardware, dtype, torch.get_num_threads()]


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()
