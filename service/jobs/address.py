"""The address of an outcome: a hash of everything that it depends on, and of whose it is."""

from __future__ import annotations

import hashlib
import json
import platform
from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from service.evaluation.unit import Subject, Unit
from service.models.registry import ModelRegistry

CODE = ("patches", "service.evaluation")
"""Packages that decide what an outcome is."""

UNRELATED = {"_name_or_path", "transformers_version"}
"""Keys of a configuration that say where a model came from and not what it is."""

BLOCK = 1 << 20
"""Numbers of a tensor that are summed at a time."""


class Addresses:
    """Addresses of units on served models, whose fingerprints are taken once."""

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models
        self._fingerprints: dict[str, str] = {}

    def key(self, unit: Unit, tenant: str, job_id: str | None = None) -> str:
        """SHA-256 in hex. The tenant is part of it: nobody learns from a quick answer what another has measured. With
        ``job_id`` the outcome is that job's alone."""
        return _digest(
            {
                "kind": unit.kind,
                "inputs": unit.inputs(),
                "encoding": encoding(unit.subject, unit.length),
                "model": self._fingerprint(unit.subject.model),
                "code": code_version(),
                "tenant": tenant,
                "job": job_id,
            }
        )

    def _fingerprint(self, name: str) -> str:
        if name not in self._fingerprints:
            model = self._models.get(name).patch.model
            self._fingerprints[name] = _digest([fingerprint(model), numerics(model)])
        return self._fingerprints[name]


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no place in an address")


def encoding(subject: Subject, length: int) -> dict[str, Any]:
    """The encoding in effect, whatever name it was asked for by."""
    described = subject.patch.describe(subject.method, length)
    resolved = subject.patch.resolve(subject.method, length)
    inv_freq = np.asarray(resolved.inv_freq, np.float64).tobytes()
    return {name: value for name, value in described.items() if name != "requested"} | {
        "inv_freq": hashlib.sha256(inv_freq).hexdigest()
    }


def fingerprint(model: Any) -> str:
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
    places = torch.arange(1, BLOCK + 1, dtype=torch.float64, device=flat.device) / BLOCK
    sums = []
    for block in flat.split(BLOCK):
        values = block.double()
        sums.append(torch.stack((values.sum(), values.abs().sum(), (values * places[: len(values)]).sum())).tolist())
    return [*sums, flat[:64].double().tolist()]


def numerics(model: Any) -> list[Any]:
    """What rounding depends on beside the code: versions, hardware, number format, threads."""
    device, dtype = model.device, str(model.dtype)
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        hardware = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    versions = [torch.__version__, metadata.version("transformers")]
    return [versions, device.type, hardware, dtype, torch.get_num_threads()]


@lru_cache(maxsize=1)
def code_version() -> str:
    """SHA-256 of the sources of ``CODE``, as they were when this process asked first."""
    return hash_of_sources([folder_of(package) for package in CODE])


def folder_of(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(package)
    return Path(next(iter(spec.submodule_search_locations)))


def hash_of_sources(folders: list[Path]) -> str:
    """SHA-256 of every Python file below ``folders``, names and contents."""
    found = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            contents = hashlib.sha256(path.read_bytes()).hexdigest()
            found.update(f"{folder.name}/{path.relative_to(folder).as_posix()} {contents}\n".encode())
    return found.hexdigest()
