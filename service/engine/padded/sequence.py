"""A request in the padded engine: its tokens and its cache."""

from __future__ import annotations

import time
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from service.engine.padded.caches import joined, row_of
from service.engine.padded.room import make_room
from service.engine.request import EngineRequest


class Output(NamedTuple):
    """The tokens generated so far. ``lifespan`` is (first step, end) on the clock of ``time.perf_counter``."""

    generated_tokens: list[int]
    lifespan: tuple[float, float]
    finished: bool
    error: str | None = None

    def is_finished(self) -> bool:
        return self.finished


@dataclass(eq=False)
class Sequence:
    """Prompt and generated tokens, of which the first ``num_computed`` are in the cache.

    The cache is its own, or a row of ``batch``.
    """

    request: EngineRequest
    num_computed: int = 0
    cache: Any = None
    batch: Batch | None = None
    began: float = -1.0
    token_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_ids)

    @property
    def pending(self) -> list[int]:
        """Tokens that are not in the cache yet."""
        return self.token_ids[self.num_computed :]

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def has_state(self) -> bool:
        """True if it occupies memory."""
        return self.num_computed > 0

    @property
    def num_cached(self) -> int:
        """Tokens in its cache; an encoding that forgets caches the first and the last ones."""
        window = self.request.sink_window
        return self.num_computed if window is None else min(self.num_computed, sum(window))

    @property
    def is_decoding(self) -> bool:
        return self.has_state and self.num_computed == len(self.token_ids) - 1

    def is_complete(self) -> bool:
        request, generated = self.request, self.num_generated
        return generated > 0 and (generated >= request.max_new_tokens or self.token_ids[-1] in request.ends_at)

    def forget(self) -> None:
        """Drop the cache: every token is computed again."""
        self.num_computed, self.cache, self.batch = 0, None, None

    def own_cache(self) -> Any:
        """Its cache outside of any batch."""
        if self.batch is not None:
            row = self.batch.rows.index(self)
            self.cache, self.batch = row_of(self.batch.cache, row, self.num_computed), None
        return self.cache

    def generated(self) -> list[int]:
        return self.token_ids[len(self.request.prompt_ids) :]

    def output(self, error: Exception | None = None) -> Output:
        finished = error is not None or self.is_complete()
        ended = time.perf_counter() if finished else -1.0
        return Output(self.generated(), (self.began, ended), finished, None if error is None else str(error))


@dataclass(eq=False)
class Batch:
    """Sequences whose next tokens run in one forward, and their joined cache."""

    rows: list[Sequence]
    cache: Any

    @classmethod
    def of(cls, rows: list[Sequence]) -> Batch:
        """The batch of exactly these rows. Their caches are joined when the rows are others than in the last step.

        Raises:
            CannotJoin: when the model's caches do not join.
        """
        last = rows[0].batch
        if last is not None and last.rows == rows and all(row.batch is last for row in rows):
            return last
        caches = [row.own_cache() for row in rows]
        if len(rows) == 1:
            return cls(rows, caches[0])
        batch = cls(rows, joined(caches))
        for row in rows:
            row.cache, row.batch = None, batch
        return batch

    def computed(self, cache: Any, new_tokens: int) -> None:
        """Note a forward over ``new_tokens`` tokens of every row, after which the cache is ``cache``.

        A new cache gets room for the prompt. With an encoding that forgets tokens, it stays short and needs none.
        """
        first = self.rows[0]
        if not first.num_computed and first.request.sink_window is None:
            make_room(cache, len(first.token_ids))
        self.cache = cache
        for row in self.rows:
            row.num_computed += new_tokens
            if row.batch is None:
                row.cache = cache


def batches(rows: Tokens[Sequence], *, together: bool) -> list[list[Sequence]]:
    """``rows`` in groups for one forward each, in which at most half of the cached tokens are padding.

    A row whose encoding forgets tokens is alone, since its cache has a gap; without ``together`` every row is.
    """
    shares = [together and row.request.sink_window is None for row in rows]
    groups = [[row] for row, shared in zip(rows, shares, strict=True) if not shared]
    rest = [row for row, shared in zip(rows, shares, strict=True) if shared]
    longest = tokens = 0
    for row in sorted(rest, key=lambda row: -row.num_computed):
        if longest and (len(groups[-1]) + 1) * longest <= 2 * (tokens + row.num_computed):
            groups[-1].append(row)
            tokens += row.num_computed
        else:
            groups.append([row])
            longest = tokens = row.num_computed
    return groups
