"""The encodings under which the keys of a cache were written. The cache has them as an attribute, so copies do too."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from patches.encoding.recipe import ResolvedRecipe

_ATTRIBUTE = "_position_encodings"


def refuse_other_keys(cache: Any, encodings: Set[ResolvedRecipe]) -> None:
    """Keys stay as they were written, so their encodings continue. A cache from elsewhere has no mark, and passes.

    Raises:
        ValueError: for a ``cache`` with keys of others than ``encodings``, or of several texts in a row.
    """
    written = getattr(cache, _ATTRIBUTE, encodings)
    if encodings == written:
        return
    if not cache.get_seq_length():
        delattr(cache, _ATTRIBUTE)
    elif not written:
        raise ValueError("past_key_values: rows of several texts take no more tokens")
    elif not encodings <= written:
        raise ValueError(
            "past_key_values: its keys were written under another encoding; continue under the same one, or give an "
            "empty cache"
        )


def mark(output: Any, encodings: Set[ResolvedRecipe]) -> None:
    """Mark the cache in the ``output`` of a forward: its keys were written under ``encodings``; none of several texts
    in a row."""
    cache = getattr(output, "past_key_values", None)
    if isinstance(output, tuple):
        cache = next((part for part in output if hasattr(part, "get_seq_length")), None)
    if cache is not None and not hasattr(cache, _ATTRIBUTE):
        setattr(cache, _ATTRIBUTE, frozenset(encodings))
