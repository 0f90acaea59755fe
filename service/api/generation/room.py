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
    """The longest reserved length that the context, the ranges of ``auto`` and a table of positions allow."""
    if isinstance(method, Auto):
        return min(model.max_length, method.longest or model.max_length)
    geometry = model.patch.geometry
    if geometry.table_rows is None:
        return model.max_length
    try:
        return method.recipe(geometry).longest(geometry, model.max_length)
    except ValueError:
        return model.max_length  # the check of the prompt says why it does not fit
