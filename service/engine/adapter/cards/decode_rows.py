"""The rows of a step that replays a graph. Most steps have those of the step before, one token longer."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import numpy as np
from transformers.generation.continuous_batching.requests import RequestState

from service.engine.adapter.pages.cache import EncodingCache
from service.engine.request import EngineRequest


class DecodeRows:
    """``numbers``, ``pages`` and ``tokens`` are what ``DecodeSteps.of`` takes of the last ``take``.

    ``known`` are its requests; None for one that was cancelled meanwhile.
    """

    def __init__(self, cache: EncodingCache, requests: dict[str, EngineRequest]) -> None:
        self._cache, self._requests = cache, requests
        self._states: list[RequestState] = []
        self.known: list[EngineRequest | None] = []
        self._next: list[int] = []
        self.numbers = np.zeros((0, 2), np.int64)
        self.pages: list[dict[int, tuple[int, ...]]] = []
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
            for state in states:  # as in steps without a graph; later pages go back when one begins
                self._cache.evict(state)
            # A request that was cancelled meanwhile has any slot: its result is dropped, whatever its positions read.
            slots = [0 if request is None else request.slot for request in known]
            self.numbers = np.zeros((len(slots), 2 + 2 * self._cache.groups), np.int64)
            self.numbers[:, 0] = slots
        self.numbers[:, 1] = positions
        self.pages = [{} for _ in range(self._cache.groups)]
        for row in changed:
            for group, own in enumerate(self._cache.pages_of(states[row].request_id)):
                self.pages[group][row] = own.pages
                self.numbers[row, 2 + 2 * group : 4 + 2 * group] = own.first, own.evicted
        self._states, self.known, self._next = states, known, [position + 1 for position in positions]

    @property
    def following(self) -> np.ndarray:
        """``numbers`` one token later, from the same pages."""
        following = self.numbers.copy()
        following[:, 1] += 1
        return following

    def forget(self) -> None:
        """Look at everything in the next step."""
        self._next = []

    def _changed(self, states: Sequence[RequestState], positions: Sequence[int]) -> list[int]:
        """Rows whose pages may be others than in the step before.

        A table grows, and an equal page replaces one of it, when a page is full. Evicted pages depend on the position.
        """
        size, windows = self._cache.page_size, self._cache.windows
        if not windows:
            return [row for row, position in enumerate(positions) if not position % size]
        return [
            row
            for row, (state, position) in enumerate(zip(states, positions, strict=True))
            if not position % size or state.request_id in windows
        ]
