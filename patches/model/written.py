"""The encodings under which the rows of a cache were written, and the position of its first token.

The cache has them as attributes, so copies do too.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

import torch

from patches.encoding.recipe import ResolvedRecipe

_ATTRIBUTE = "_encodings_of_rows"
_FIRST = "_first_position"

ANYWHERE = range(1 << 62)
"""Positions at which the next token may lie when nothing is known of those before."""


def refuse_other_keys(cache: Any, encodings: tuple[ResolvedRecipe, ...]) -> None:
    """Keys stay as they were written, so each row continues under its one of ``encodings``.

    A cache from elsewhere has no mark, and passes. A cache whose rows were made fewer or more layer by layer has marks
    of other rows. Then any of its encodings pass.

    Raises:
        ValueError: for a ``cache`` with keys of others than ``encodings``, or of several texts in a row.
    """
    written = getattr(cache, _ATTRIBUTE, encodings)
    if encodings == written:
        return
    if not cache.get_seq_length():
        delattr(cache, _ATTRIBUTE)
    elif not written:
        raise ValueError("cache: rows of several texts take no more tokens")
    elif not set(encodings) <= set(written):
        raise ValueError(
            "cache: its keys were written under another encoding; continue under the same one, or give an empty cache"
        )
    elif len(encodings) == len(written):
        row = next(row for row, pair in enumerate(zip(encodings, written, strict=True)) if pair[0] != pair[1])
        raise ValueError(
            f"cache: the keys of row {row} were written under another encoding; continue rows as they began, "
            "or give an empty cache"
        )


def following(cache: Any, *, exactly: bool) -> range:
    """The positions at which the next token of rows in ``cache`` may lie: one by one behind those that it has.

    Bands and masks go by the distance of positions, which a cache does not keep. Plain attention does not, so only
    ``exactly`` refuses a gap. Behind keys from elsewhere, the position is at least their number. Nothing is known of an
    empty cache, and of a static one without a wait.
    """
    if not hasattr(cache, "get_seq_length") or getattr(cache, "is_compileable", False):
        return ANYWHERE
    count, first = int(cache.get_seq_length()), getattr(cache, _FIRST, None)
    if not count:
        return ANYWHERE
    if first is None or not exactly:
        return range(count, ANYWHERE.stop)
    return range(first + count, first + count + 1)


def evicted(cache: Any, count: int) -> None:
    """``count`` tokens have left ``cache``: the next one has the same position as before."""
    if getattr(cache, _FIRST, None) is not None:
        setattr(cache, _FIRST, getattr(cache, _FIRST) + count)


def mark(output: Any, encodings: tuple[ResolvedRecipe, ...], next_position: int | None = None) -> None:
    """Mark the cache in the ``output`` of a forward: its rows were written under ``encodings``; none of several texts
    in a row. ``next_position`` is that of their next tokens, where all rows have the same."""
    cache = getattr(output, "cache", None)
    if isinstance(output, tuple):
        cache = next((part for part in output if hasattr(part, "get_seq_length")), None)
    if cache is not None and not getattr(cache, "is_compileable", False):
        first = None if next_position is None else next_position - int(cache.get_seq_length())
        setattr(cache, _FIRST, first)
    if cache is not None and not hasattr(cache, _ATTRIBUTE):
        setattr(cache, _ATTRIBUTE, encodings)
        if len(set(encodings)) > 1:
            kind: Any = type(cache)  # mypy finds a class not hashable
            cache.__class__ = _following(kind)


class _Following:
    """A cache of several encodings, whose marks follow its rows.

    Methods on the instance would refer to it. Its keys would then remain in memory until a collection of garbage.
    """

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self._choose(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)  # type: ignore[misc]
        self._choose(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self._choose(torch.arange(len(getattr(self, _ATTRIBUTE, ()))).repeat_interleave(repeats))

    def _choose(self, rows: torch.Tensor) -> None:
        if written := getattr(self, _ATTRIBUTE, ()):
            chosen = torch.arange(len(written))[torch.as_tensor(rows).cpu()].tolist()
            setattr(self, _ATTRIBUTE, tuple(written[row] for row in chosen))

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies and pickles, which find no class that was made here by its name."""
        return _restored, (type(self).__mro__[2],), vars(self)


@lru_cache
def _following(kind: type) -> type:
    """The class of a cache of ``kind`` that follows its rows."""
    return kind if issubclass(kind, _Following) else type(kind.__name__, (_Following, kind), {})


def _restored(kind: type) -> _Following:
    made = cast(type[_Following], _following(kind))
    return made.__new__(made)
