"""The rows of a step that replays a graph. Most steps have those of the step before, one token longer."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import numpy as np
from transformers.generation.continuous_batching.requests import RequestState

from service.engine.adapter.pages.cache import EncodingCache
from service.engine.adapter.pages.windowed import allocator_of
from service.engine.request import EngineRequest


class DecodeRows:
    """``numbers`` int64 [n, 4], ``pages`` and ``tokens`` are what ``DecodeSteps.of`` takes of the last ``take``.

    ``known`` are its requests; None for one that was cancelled meanwhile.
    """

    def __init__(self, cache: EncodingCache, requests: dict[str, EngineRequest]) -> None:
        self._cache, self._requests = cache, requests
        self._states: list[RequestState] = []
        self.known: list[EngineRequest | None] = []
        self._next: list[int] = []
        self.numbers = np.zeros((0, 4), np.int64)
        self.pages: dict[int, tuple[int, ...]] = {}
        self.tokens: list[int] = []

    def take(self, states: list[RequestState]) -> None:
        """Have a step in which each of ``states`` reads one token."""
        known = [self._requests.get(state.request_id) for state in states]
        positions = [state.position_offset for state in states]
        same = positions == self._next and all(map(is_, states, self._states)) and all(map(is_, known, self.known))
        self.tokens = [state.tokens_to_process[0] for state in states]
        if same:
            changed = self._changed(states, positions)
        else:
            changed = list(range(len(states)))
            # A request that was cancelled meanwhile has any slot: its result is dropped.
            slots = [0 if request is None else request.slot for request in known]
            self.numbers = np.array([(slot, 0, 0, 0) for slot in slots], np.int64)
        self.numbers[:, 1] = positions
        self.pages = {}
        for row in changed:
            self.pages[row], first_pages, evicted = self._cache.pages_of(states[row].request_id)
            self.numbers[row, 2:] = first_pages, evicted
        self._states, self.known, self._next = states, known, [position + 1 for position in positions]

    @property
    def following(self) -> np.ndarray:
        """``numbers`` one token later, from the same pages."""
        following: np.ndarray = self.numbers + np.array((0, 1, 0, 0))
        return following

    def forget(self) -> None:
        """Look at everything in the next step."""
        self._next = []

    def _changed(self, states: Sequence[RequestState], positions: Sequence[int]) -> list[int]:
        """Rows whose pages may be others than in the step before.

        A table grows, and an equal page replaces one of it, when a page is full. Evicted pages depend on the position.
        """
        size, allocator = self._cache.page_size, allocator_of(self._cache)
        assert allocator is not None, "with paged attention, every layer caches every key"
        if not allocator.windows:
            return [row for row, position in enumerate(positions) if not position % size]
        windows = allocator.windows
        return [
            row
            for row, (state, position) in enumerate(zip(states, positions, strict=True))
            if not position % size or state.request_id in windows
        ]
