"""Successive halving (Jamieson and Talwalkar, arXiv:1502.07943): each round reads more windows with fewer candidates.

A quarter of the candidates goes on to a round of four times as many windows. The checkpoint's own encoding, candidate
0, is in every round. A round that would add no window is left out, so few windows make fewer rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from service.evaluation.checks import InvalidEvaluation
from service.evaluation.cost import Cost

RATE = 4
FINALISTS = 2
"""Candidates of the last round, beside the checkpoint's own encoding."""

AT_SHORTER = FINALISTS + 2
"""Candidates at a shorter length: the finalists, the best plain one and the checkpoint's own encoding."""


@dataclass(frozen=True)
class Schedule:
    """``candidates`` at the ``target`` length, ``windows`` in the last round; then the lengths ``shorter``, and first
    ``at_reference`` encodings at the ``reference`` length (tokens). ``stages`` of None are all."""

    candidates: int
    windows: int
    target: int
    reference: int
    shorter: tuple[int, ...]
    stages: int | None = None
    at_reference: int = 1

    @cached_property
    def _halved(self) -> list[int]:
        """Most candidates of each round, with as many windows as that takes."""
        counts = [self.candidates]
        while counts[-1] > FINALISTS + 1:
            counts.append(max(FINALISTS, -(-counts[-1] // RATE)))
        # The checkpoint's own encoding comes on top.
        return [counts[0], *(min(self.candidates, count + 1) for count in counts[1:])]

    @cached_property
    def read(self) -> list[int]:
        """Windows that a candidate of each round has read at its end, always more than a round before."""
        last = len(self._halved) - 1
        return sorted({-(-self.windows // RATE ** (last - round_)) for round_ in range(last + 1)})

    @cached_property
    def entrants(self) -> list[int]:
        """Most candidates of each round."""
        return self._halved[: len(self.read)]

    @property
    def at_shorter(self) -> int:
        """Windows of a candidate at each shorter length: two have no interval, and a few a wide one."""
        return min(self.windows, max(4, self.windows // 4))

    def bound(self, stage: int) -> Cost:
        """The most that a stage takes."""
        if stage < len(self.entrants):
            new = self.read[stage] - (self.read[stage - 1] if stage else 0)
            passes = self.entrants[stage] * new
            reference = 0 if stage else self.at_reference * self.windows
            return Cost(passes * self.target + reference * self.reference, passes + reference, passes + reference)
        if stage == len(self.entrants):
            passes = min(AT_SHORTER, self.candidates) * self.at_shorter
            return Cost(passes * sum(self.shorter), passes * len(self.shorter), passes * len(self.shorter))
        return Cost()

    @property
    def whole(self) -> int:
        """Stages: the rounds, then the shorter lengths."""
        every = len(self.entrants) + (1 if self.shorter and self.candidates > 1 else 0)
        return every if self.stages is None else min(every, self.stages)

    def cost_from(self, stage: int) -> Cost:
        """The most that this and all later stages take."""
        return sum((self.bound(later) for later in range(stage, self.whole)), Cost())

    def within(self, budget: int | None) -> Schedule:
        """The schedule with as many windows as ``budget`` tokens allow.

        Raises:
            InvalidEvaluation: when two windows take more.
        """
        if budget is None:
            return self
        for windows in range(self.windows, 1, -1):
            smaller = replace(self, windows=windows)
            if smaller.cost_from(0).tokens <= budget:
                return smaller
        least = replace(self, windows=2).cost_from(0).tokens
        raise InvalidEvaluation("budget", f"must be at least {least} tokens for {self.candidates} candidates")
