"""The engine of a model: paged where pages can cache its layers, padded otherwise, or none: it is only scored."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from patches import PagedBackend, Patched, runs_triton
from service.engine.adapter import EncodingManager, OnStep
from service.engine.limits import EngineLimits
from service.engine.padded import OnApart, PaddedLoop

EngineKind = Literal["paged", "padded", "none"]
Attention = Literal["triton", "eager", "segments"]
"""On block tables in Triton or in plain torch, or sequence by sequence on SDPA."""


class AttentionUnavailable(ValueError):
    """The machine cannot run the attention that a setting asks for."""


class GraphsUnavailable(ValueError):
    """The machine or the attention cannot do with the CUDA graphs that a setting asks for."""


class CannotGenerate(RuntimeError):
    """No engine serves this model: it is scored, and generates nothing."""


@dataclass(frozen=True)
class EngineChoice:
    """``reason`` says why the model has no faster engine. ``together`` lets rows share a forward of the padded one.

    ``graphs``: decode steps are captured and replayed on the card. ``recorded``: they run from lists of their calls.
    """

    kind: EngineKind = "paged"
    together: bool = True
    reason: str | None = None
    attention: Attention = "segments"
    graphs: bool = False
    recorded: bool = False

    @property
    def backend(self) -> PagedBackend | None:
        """The backend of paged attention; None without block tables."""
        return None if self.attention == "segments" else self.attention

    @property
    def generates(self) -> bool:
        return self.kind != "none"

    def __str__(self) -> str:
        graphs = ", CUDA graphs" if self.graphs else ""
        attention = "" if self.attention == "segments" else f" ({self.attention} attention{graphs})"
        return f"{self.kind} engine" + attention + ("" if self.together else " (one row at a time)")

    @property
    def slower(self) -> EngineChoice:
        """The same engine whose steps run as ever."""
        return replace(self, graphs=False, recorded=False)

    def apart(self, error: Exception) -> EngineChoice:
        """The same engine with a forward for each row, since the caches of some did not join in service."""
        reasons = (self.reason, f"the {self} fails on it in service: {error}")
        return replace(self, together=False, reason="; ".join(filter(None, reasons)))

    def built(
        self,
        patch: Patched,
        limits: EngineLimits,
        on_step: OnStep = lambda use, variant: None,
        on_apart: OnApart = lambda error: None,
    ) -> EncodingManager | PaddedLoop:
        """The engine, before its thread starts.

        The paged one calls ``on_step`` after each step, and the padded one ``on_apart`` when rows do not join.

        Raises:
            UnsupportedModel: when it cannot serve the model.
        """
        if self.kind != "paged":  # without an engine, its thread computes scores only
            return PaddedLoop(patch, limits, together=self.together, on_apart=on_apart)
        return EncodingManager(patch, limits, self.backend, graphs=self.graphs, recorded=self.recorded, on_step=on_step)


PAGED = EngineChoice(recorded=True)

CHOICES = (PAGED, PAGED.slower, EngineChoice("padded"), EngineChoice("padded", together=False))
"""Engines from the fastest to the slowest."""


def choices(attention: Attention, device: torch.device, graphs: bool | None = None) -> tuple[EngineChoice, ...]:
    """The engines to try, those with ``attention`` first. ``graphs`` None: with CUDA graphs where they are possible.

    Raises:
        AttentionUnavailable: for ``triton`` without Triton, or on a device without it.
        GraphsUnavailable: for graphs on another device than CUDA, or with another attention than ``triton``.
    """
    if attention == "triton" and not runs_triton(device):
        raise AttentionUnavailable(
            f"attention 'triton' needs a CUDA device and the package triton, and the device is {device.type}: "
            "use 'eager' or 'segments'"
        )
    are_possible = attention == "triton" and device.type == "cuda"
    if graphs and not are_possible:
        raise GraphsUnavailable(
            f"CUDA graphs need a CUDA device and the attention 'triton', and they are {device.type} and '{attention}'"
        )
    others = tuple(choice for choice in CHOICES if device.type == "cpu" or not choice.recorded)
    if attention == "segments":
        return others
    own = EngineChoice(attention=attention)
    captured = (replace(own, graphs=True),) if are_possible and graphs is not False else ()
    return (*captured, own, *others)
