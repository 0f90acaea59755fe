"""The engine of a model: paged where pages can cache its layers, padded otherwise, or none: it is only scored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from patches import PagedBackend, Patched, runs_triton
from service.engine.adapter import EncodingManager
from service.engine.limits import EngineLimits
from service.engine.padded import PaddedLoop

EngineKind = Literal["paged", "padded", "none"]
Attention = Literal["triton", "eager", "segments"]
"""On block tables in Triton or in plain torch, or sequence by sequence on SDPA."""


class AttentionUnavailable(ValueError):
    """The machine cannot run the attention that a setting asks for."""


class CannotGenerate(RuntimeError):
    """No engine serves this model: it is scored, and generates nothing."""


@dataclass(frozen=True)
class EngineChoice:
    """``reason`` says why the model has no faster engine. ``together`` lets rows share a forward of the padded one."""

    kind: EngineKind = "paged"
    together: bool = True
    reason: str | None = None
    attention: Attention = "segments"

    @property
    def backend(self) -> PagedBackend | None:
        """The backend of paged attention; None without block tables."""
        return None if self.attention == "segments" else self.attention

    @property
    def generates(self) -> bool:
        return self.kind != "none"

    def __str__(self) -> str:
        attention = "" if self.attention == "segments" else f" ({self.attention} attention)"
        return f"{self.kind} engine" + attention + ("" if self.together else " (one row at a time)")

    def built(self, patch: Patched, limits: EngineLimits) -> EncodingManager | PaddedLoop:
        """The engine, before its thread starts.

        Raises:
            UnsupportedModel: when it cannot serve the model.
        """
        if self.kind != "paged":  # without an engine, its thread computes scores only
            return PaddedLoop(patch, limits, together=self.together)
        return EncodingManager(patch, limits, self.backend)


PAGED = EngineChoice()

CHOICES = (PAGED, EngineChoice("padded"), EngineChoice("padded", together=False))
"""Engines from the fastest to the slowest."""


def choices(attention: Attention, device: torch.device) -> tuple[EngineChoice, ...]:
    """The engines to try, those with ``attention`` first.

    Raises:
        AttentionUnavailable: for ``triton`` without Triton, or on a device without it.
    """
    if attention == "triton" and not runs_triton(device):
        raise AttentionUnavailable(
            f"attention 'triton' needs a CUDA device and the package triton, and the device is {device.type}: "
            "use 'eager' or 'segments'"
        )
    return CHOICES if attention == "segments" else (EngineChoice(attention=attention), *CHOICES)
