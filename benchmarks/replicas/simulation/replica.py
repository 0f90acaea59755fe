"""One replica: memory that requests reserve, a cache of prefixes, and steps that read prompts and decode together."""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.replicas.simulation.times import ServiceTimes
from benchmarks.replicas.simulation.workload import Request


@dataclass(frozen=True)
class Slowdown:
    """Wall time per CPU time of a replica, ``factors[i]`` from ``since[i]`` on: other processes use its processors."""

    since: Sequence[float] = (0.0,)
    factors: Sequence[float] = (1.0,)

    def at(self, now: float) -> tuple[float, float]:
        """(factor, time at which it changes)."""
        later = bisect.bisect_right(self.since, now)
        until = self.since[later] if later < len(self.since) else math.inf
        return self.factors[max(later - 1, 0)], until


class PrefixCache:
    """Pages that no running request uses, least recently freed first. The pages of an answer that no other request
    shares remain as well, until their turn."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self._tokens = capacity, 0
        self._entries: OrderedDict[object, int] = OrderedDict()

    def __contains__(self, prefix: object) -> bool:
        return prefix in self._entries

    def add(self, key: object, tokens: int, in_use: int) -> None:
        """Add or refresh an entry; the oldest ones leave until everything fits beside ``in_use`` tokens."""
        self._tokens += tokens - self._entries.pop(key, 0)
        self._entries[key] = tokens
        self.fit(in_use)

    def fit(self, in_use: int) -> None:
        """Remove the oldest entries until everything fits beside ``in_use`` tokens."""
        while self._entries and self._tokens + in_use > self.capacity:
            self._tokens -= self._entries.popitem(last=False)[1]


class Replica:
    """Runs its requests in steps.

    Between two events it takes many equal steps at once: ``wake`` ends such a run, and an arrival cuts it at the end
    of the step in progress.
    """

    def __init__(self, name: str, times: ServiceTimes, slowdown: Slowdown = Slowdown()) -> None:
        self.name, self.times, self.slowdown = name, times, slowdown
        self.cache = PrefixCache(times.cache_tokens)
        self.requests: dict[int, Request] = {}
        """Every request that has not ended, by number."""
        self.busy_s = 0.0
        self._waiting: deque[int] = deque()
        self._reading: deque[int] = deque()
        self._decoding: list[tuple[int, int]] = []
        self._numbers = itertools.count()
        self._reserved = self._used = self._steps = self._arrived = 0
        self._began = self._each = 0.0
        self._planned = 0
        self._read: list[tuple[int, int]] = []
        self._attended = 0.0
        """Cached tokens that a step attends to: of each sequence, the mean over its steps."""

    @property
    def load(self) -> int:
        """Requests here that have not ended."""
        return len(self.requests)

    @property
    def ends(self) -> float | None:
        """Time at which the steps in progress end; None while idle."""
        return self._began + self._planned * self._each if self._planned else None

    def accept(self, now: float, request: Request) -> bool:
        """Take a request; False where too many wait for memory."""
        if len(self._waiting) >= self.times.max_queue:
            return False
        number = next(self._numbers)
        self.requests[number] = request
        self._waiting.append(number)
        self._arrived += 1
        self._admit()
        if not self._planned:
            self._plan(now)
        elif self._planned > 1:
            self._planned = max(1, math.ceil((now - self._began) / self._each))
        return True

    def wake(self) -> list[Request]:
        """End the steps in progress and begin the next ones; the requests that have ended."""
        now = self.ends
        assert now is not None
        self.busy_s += now - self._began
        self._steps += self._planned
        ended = [self._end(number, now) for number in self._finished(now)]
        self._admit()
        self._plan(now)
        return ended

    def _finished(self, now: float) -> list[int]:
        for number, tokens in self._read:
            request = self.requests[number]
            request.left -= tokens
            if not request.left:
                self._reading.popleft()
                request.first = now
                self._attended += _attended(request)
                heapq.heappush(self._decoding, (self._steps + request.new_tokens - 1, number))
                if request.prefix_tokens and not request.cached_tokens:
                    self._used -= request.prefix_tokens  # from here on the cache counts them
                    self.cache.add(request.prefix, request.prefix_tokens, self._used)
        finished = []
        while self._decoding and self._decoding[0][0] <= self._steps:
            finished.append(heapq.heappop(self._decoding)[1])
        return finished

    def _end(self, number: int, now: float) -> Request:
        request = self.requests.pop(number)
        request.end, request.outcome = now, "done"
        self._attended -= _attended(request)
        self._reserved -= self.times.pages(request.tokens)
        own = self.times.pages(request.tokens) - request.prefix_tokens
        self._used -= own
        if request.prefix_tokens:
            self.cache.add(request.prefix, request.prefix_tokens, self._used)
        self.cache.add((self.name, number), own, self._used)
        return request

    def _admit(self) -> None:
        """Start waiting requests in order, as far as their memory is free."""
        while self._waiting:
            needed = self.times.pages(self.requests[self._waiting[0]].tokens)
            if self._reserved + needed > self.times.cache_tokens:
                return
            self._reserved += needed
            self._reading.append(self._waiting.popleft())

    def _plan(self, now: float) -> None:
        """The next steps: one that reads prompts, or as many as pass until the next request ends."""
        self._began, self._read, self._planned = now, [], 0
        decoding = len(self._decoding)
        if self._reading:
            self._read = self._batch(decoding)
        if not self._read and not decoding:
            return
        tokens = sum(tokens for _, tokens in self._read)
        single = bool(self._read or self._arrived)
        self._planned = 1 if single else self._decoding[0][0] - self._steps
        factor, until = self.slowdown.at(now)
        step_s = self.times.step(decoding + len(self._read), tokens, self._arrived, self._attended)
        self._each = factor * step_s
        if until < now + self._planned * self._each:
            self._planned = max(1, math.ceil((until - now) / self._each))
        self._arrived = 0

    def _batch(self, decoding: int) -> list[tuple[int, int]]:
        """(request, prompt tokens) that the next step reads beside ``decoding`` sequences."""
        budget, rows = self.times.max_batch_tokens - decoding, self.times.max_requests_per_batch - decoding
        taken = []
        for number in itertools.islice(self._reading, max(rows, 0)):
            request = self.requests[number]
            if not request.left:
                request.cached_tokens = request.prefix_tokens if request.prefix in self.cache else 0
                request.left = request.prompt_tokens - request.cached_tokens
                self._used += self.times.pages(request.tokens) - request.cached_tokens
                self.cache.fit(self._used)
            tokens = min(request.left, budget)
            if tokens <= 0:
                break
            taken.append((number, tokens))
            budget -= tokens
        return taken


def _attended(request: Request) -> float:
    return request.prompt_tokens + request.new_tokens / 2
