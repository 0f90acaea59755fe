"""The encodings under which the keys of a cache were written. The cache has them as an attribute, so copies do too."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from patches.encoding.recipe import ResolvedRecipe

_ATTRIBUTE = "_position_encodings"


def refuse_other_keys(cache: Any, encodings: Set[ResolvedRecipe], own: ResolvedRecipe) -> None:
    """Keys stay as they were written, so their encoding continues. Unmarked ones are of the model's ``own``.

    Raises:
        ValueError: for a ``cache`` with keys of others than ``encodings``.
    """
    written = getattr(cache, _ATTRIBUTE, None)
    if cache is None or encodings <= (written or {own}):
        return
    if cache.get_seq_length():
        under = "another encoding" if written else "the default encoding"
        raise ValueError(
            f"past_key_values: its keys were written under {under}, and keep it; continue under the same one, or give "
            "an empty cache"
        )
    if written:
        delattr(cache, _ATTRIBUTE)


def mark(output: Any, encodings: Set[ResolvedRecipe]) -> None:
    """Mark the cache in the ``output`` of a forward: all its keys were written under ``encodings``."""
    cache = getattr(output, "past_key_values", None)
    if isinstance(output, tuple):
        cache = next((part for part in output if hasattr(part, "get_seq_length")), None)
    if cache is not None and not hasattr(cache, _ATTRIBUTE):
        setattr(cache, _ATTRIBUTE, frozenset(encodings))
