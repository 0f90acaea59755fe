"""The engine of a model: paged where pages can cache its layers, padded otherwise, or none: it is only scored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from patches import Patched
from service.engine.adapter import EncodingManager
from service.engine.limits import EngineLimits
from service.engine.padded import PaddedLoop

EngineKind = Literal["paged", "padded", "none"]


class CannotGenerate(RuntimeError):
    """No engine serves this model: it is scored, and generates nothing."""


@dataclass(frozen=True)
class EngineChoice:
    """``reason`` says why the model has no faster engine. ``together`` lets rows share a forward of the padded one."""

    kind: EngineKind = "paged"
    together: bool = True
    reason: str | None = None

    @property
    def generates(self) -> bool:
        return self.kind != "none"

    def __str__(self) -> str:
        return f"{self.kind} engine" + ("" if self.together else " (one row at a time)")

    def built(self, patch: Patched, limits: EngineLimits) -> EncodingManager | PaddedLoop:
        """The engine, before its thread starts.

        Raises:
            UnsupportedModel: when it cannot serve the model.
        """
        if self.kind != "paged":  # without an engine, its thread computes scores only
            return PaddedLoop(patch, limits, together=self.together)
        return EncodingManager(
            patch,
            cache_tokens=limits.cache_tokens,
            page_size=limits.page_size,
            max_batch_tokens=limits.max_batch_tokens,
            max_requests_per_batch=limits.max_requests_per_batch,
            prefix_sharing=limits.prefix_sharing,
        )


PAGED = EngineChoice()

CHOICES = (PAGED, EngineChoice("padded"), EngineChoice("padded", together=False))
"""Engines from the fastest to the slowest."""
