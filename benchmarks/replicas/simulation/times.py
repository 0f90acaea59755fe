"""Service times of one replica, as a fit to measured bursts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.paths import RECORDED


@dataclass(frozen=True)
class ServiceTimes:
    """CPU seconds of one replica, and its sizes in tokens.

    A step of the engine takes ``step_s``, and ``decode_s`` more for each sequence that decodes. Each cached token that
    these attend to adds ``read_s``, each computed prompt token ``prefill_s``. Each request that has arrived since the
    step before adds ``request_s``: parsing, admission and the answer run in the same process.
    ``start_s`` is from the start of the process to readiness.
    """

    request_s: float
    step_s: float
    decode_s: float
    read_s: float
    prefill_s: float
    start_s: float
    cache_tokens: int
    page_size: int = 32
    max_batch_tokens: int = 1024
    max_requests_per_batch: int = 128
    max_queue: int = 256

    def step(self, decoding: int, prompt_tokens: int = 0, requests: int = 0, cached_tokens: float = 0) -> float:
        """Seconds of one step."""
        return (
            self.step_s
            + self.decode_s * decoding
            + self.read_s * cached_tokens
            + self.prefill_s * prompt_tokens
            + self.request_s * requests
        )

    def pages(self, tokens: int) -> int:
        """``tokens`` rounded up to whole pages, in tokens."""
        return -(-tokens // self.page_size) * self.page_size


@dataclass(frozen=True)
class Burst:
    """Requests sent together: their number, prompt tokens and new tokens of each, and the CPU seconds of the server."""

    requests: int
    prompt_tokens: int
    new_tokens: int
    cpu_s: float

    @property
    def work(self) -> tuple[float, ...]:
        """Requests, steps, sequences of all steps, cached tokens that they attend to, prompt tokens.

        The prompts are read together in the first step, and all sequences decode together.
        """
        decoded = self.requests * (self.new_tokens - 1)
        attended = decoded * (self.prompt_tokens + self.new_tokens / 2)
        return self.requests, self.new_tokens, self.requests + decoded, attended, self.requests * self.prompt_tokens


def fitted(bursts: Sequence[Burst]) -> tuple[dict[str, float], float]:
    """(the five times of ``ServiceTimes``, the root mean square of the relative errors) by least squares; none of them
    is negative."""
    names = ["request_s", "step_s", "decode_s", "read_s", "prefill_s"]
    cpu = np.array([burst.cpu_s for burst in bursts])
    work = np.array([burst.work for burst in bursts]) / cpu[:, None]
    found, kept = np.zeros(len(names)), list(range(len(names)))
    while kept:
        found[:] = 0
        found[kept] = np.linalg.lstsq(work[:, kept], np.ones(len(cpu)), rcond=None)[0]
        if found.min() >= 0:
            break
        kept.remove(int(found.argmin()))
    error = float(np.sqrt(np.mean((work @ found - 1) ** 2)))
    return dict(zip(names, map(float, found), strict=True)), error


def recorded() -> ServiceTimes:
    """The service times that ``python -m benchmarks simulation_times --record`` has written."""
    return ServiceTimes(**json.loads((RECORDED / "simulation_times.json").read_text(encoding="utf-8"))["times"])
