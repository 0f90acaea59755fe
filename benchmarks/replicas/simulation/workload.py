"""Requests of a simulation: Poisson arrivals, and prompts that start with one of many prefixes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class Request:
    """One request, and its end: tokens, seconds since the start of the simulation.

    ``outcome`` is None until the end: "done", "refused" (429, a full queue) or "lost" (503, no replica).
    """

    arrival: float
    prefix: int
    prefix_tokens: int
    own_tokens: int
    new_tokens: int
    cached_tokens: int = 0
    first: float = float("nan")
    end: float = float("nan")
    outcome: str | None = None
    attempts: int = 0
    left: int = 0
    proxy: int = 0

    @property
    def prompt_tokens(self) -> int:
        return self.prefix_tokens + self.own_tokens

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.new_tokens


@dataclass(frozen=True)
class Workload:
    """``prefixes`` prefixes are drawn by Zipf's law with exponent ``skew``; sizes in tokens."""

    prefixes: int
    prefix_tokens: int = 512
    own_tokens: int = 32
    new_tokens: int = 32
    skew: float = 0.9

    def requests(self, rate: float, count: int, seed: int, surge: tuple[float, float] | None = None) -> list[Request]:
        """``count`` requests at ``rate`` per second. With ``surge`` (time, factor), the rate is so many times higher
        after that time."""
        noise = np.random.default_rng(seed)
        weights = 1 / np.arange(1, self.prefixes + 1) ** self.skew
        drawn = noise.choice(self.prefixes, count, p=weights / weights.sum())
        arrivals = np.cumsum(noise.exponential(1 / rate, count))
        if surge is not None:
            at, factor = surge
            arrivals = np.where(arrivals > at, at + (arrivals - at) / factor, arrivals)
        sizes = (self.prefix_tokens, self.own_tokens, self.new_tokens)
        return [Request(float(time), int(prefix), *sizes) for time, prefix in zip(arrivals, drawn, strict=True)]
