"""The address of an outcome: a hash of everything that it depends on, and of its tenant."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from service.evaluation.setup import code_version
from service.evaluation.unit import Unit
from service.models.registry import ModelRegistry


class Addresses:
    """Addresses of units on served models."""

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models

    def key(self, unit: Unit, tenant: str, job_id: str | None = None) -> str:
        """SHA-256 in hex. The tenant is part of it: a quick answer must not show one tenant the work of another. With
        ``job_id`` the outcome is that job's alone."""
        return _digest(
            {
                "kind": unit.kind,
                "inputs": unit.inputs(),
                "encoding": encoding(unit),
                "model": self._models.get(unit.subject.model).fingerprint,
                "code": code_version(),
                "tenant": tenant,
                "job": job_id,
            }
        )


def versions_of(models: ModelRegistry) -> dict[str, str]:
    """The models of a server by name, with their fingerprints and our code."""
    return {model.name: f"{model.fingerprint} {code_version()}" for model in models}


def setup_digest(names: Iterable[str], versions: Mapping[str, str]) -> str | None:
    """SHA-256 in hex of the ``versions`` of the models that a job needs; None unless all of them are there. Outcomes of
    another setup may differ."""
    needed = {name: versions.get(name) for name in names}
    return None if None in needed.values() else _digest(needed)


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no place in an address")


def encoding(unit: Unit) -> dict[str, Any]:
    """The encoding in effect, without its requested name."""
    described = unit.subject.patch.describe(unit.method, unit.length)
    inv_freq = np.asarray(unit.resolved.inv_freq, np.float64).tobytes()
    return {name: value for name, value in described.items() if name != "requested"} | {
        "inv_freq": hashlib.sha256(inv_freq).hexdigest()
    }
