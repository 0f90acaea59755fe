"""Tokens that a prompt may have beside its answer, for prompts that are cut to fit."""

from __future__ import annotations

from dataclasses import dataclass

from patches import Method
from service.models.registry import ServedModel
from service.policy.auto import Auto
from service.settings import Settings

SHARE = 4
"""An answer without a limit gets this part of the context at most, beside a prompt that is cut."""


@dataclass(frozen=True)
class Room:
    """Tokens that a prompt may have: ``whole`` if it stays as it is, or else ``short``."""

    whole: int
    short: int

    @classmethod
    def of(cls, model: ServedModel, method: Method, most: int | None, settings: Settings) -> Room:
        """The room beside ``most`` new tokens, or any number of them."""
        context = longest(model, method)
        if most is None:
            return cls(context - 1, context - min(settings.max_new_tokens, context // SHARE))
        return cls(context - most, context - most)


def longest(model: ServedModel, method: Method) -> int:
    """The longest reserved length that the context and the ranges of ``auto`` allow."""
    last = method.longest if isinstance(method, Auto) else None
    return model.max_length if last is None else min(model.max_length, last)
