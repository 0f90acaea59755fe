"""Sampling's share of a step on a CPU: 64 requests of a model with a vocabulary of 131,072 tokens, through the engine.

A random model's logits are nearly equal, so top-p keeps most tokens. Its last layer is scaled to have peaks as a
trained model's.
"""

from __future__ import annotations

import itertools
import statistics
import time
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any
from unittest import mock

import torch

from benchmarks.models import ENCODINGS, SHAPE_28M, llama, random_model
from benchmarks.speed.generate_speed import concurrent, methods_of, serving
from benchmarks.timing import Report
from patches import patched
from service.engine.adapter import runner
from service.engine.limits import EngineLimits
from service.engine.request import SamplingParams
from service.engine.sampling import sample
from service.models.linear.layers import use_fastest

ROWS = 64
PROMPT_TOKENS = 4
VOCABULARY = 131072
THREADS = 1
PEAKS = 4.0
"""Factor of the last layer's weights: top-p of 0.95 keeps some hundred tokens."""

SHAPE_1B = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "max_position_embeddings": 1024,
}
"""The shape of Llama 3.2 1B."""

SUBJECTS: dict[str, tuple[dict[str, int], float]] = {
    "28M and its vocabulary, nearly equal logits": (SHAPE_28M, 1.0),
    "28M and its vocabulary": (SHAPE_28M, PEAKS),
    "1B": (SHAPE_1B, PEAKS),
}

SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=0.8, top_p=0.95, seed=1),
    SamplingParams(temperature=0.8, top_k=50, seed=1),
    SamplingParams(temperature=0.8, min_p=0.05, seed=1),
)


class _Clock:
    """The engine's ``sample``, and its times: (begin, end) of each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, float]] = []

    def __call__(self, logits: torch.Tensor, requests: Any, *, own: Any = sample) -> torch.Tensor:
        begin = time.perf_counter()
        tokens: torch.Tensor = own(logits, requests)
        if len(requests) == ROWS:
            self.calls.append((begin, time.perf_counter()))
        return tokens

    def medians(self) -> tuple[float, float]:
        """Seconds of sampling, and of a whole step."""
        begins = [begin for begin, _ in self.calls]
        steps = [later - earlier for earlier, later in itertools.pairwise(begins)]
        return statistics.median(end - begin for begin, end in self.calls), statistics.median(steps)


def measure(name: str, steps: int, report: Report) -> None:
    """Add the rows of the subject ``name``."""
    shape, factor = SUBJECTS[name]
    model = random_model(llama(**shape | {"vocab_size": VOCABULARY}))
    with torch.no_grad():
        model.lm_head.weight.mul_(factor)
    use_fastest(model)
    generator = torch.Generator().manual_seed(1)
    with ExitStack() as stack:
        patch = stack.enter_context(patched(model))
        loop, engine = stack.enter_context(serving(patch, EngineLimits(cache_tokens=64 * ROWS, score_tokens=4096)))
        for sampling in SAMPLINGS:
            prompts = torch.randint(3, VOCABULARY - 8, (ROWS, PROMPT_TOKENS), generator=generator).tolist()
            clock = stack.enter_context(mock.patch.object(runner, "sample", _Clock()))
            methods = methods_of(ENCODINGS[:1], ROWS)
            loop.run(concurrent(engine, prompts, methods, steps, sampling=sampling))
            own, step = clock.medians()
            given = {key: value for key, value in asdict(sampling).items() if value != getattr(SAMPLINGS[0], key)}
            label = ", ".join(f"{key} {value}" for key, value in given.items() if key != "seed") or "greedy"
            report.add(name, label, f"{own * 1e3:.1f}", f"{step * 1e3:.0f}", f"{own / step:.1%}")


def run(quick: bool = False) -> Report:
    """A small model, most of which is its vocabulary, and one of 1B parameters."""
    torch.set_num_threads(THREADS)
    report = Report(
        "sampled_rows",
        f"{ROWS} rows of {VOCABULARY:,} tokens, {THREADS} thread, float32 (goal: 5 % of a step)",
        ("model", "sampling", "ms for all rows", "ms of a step", "share"),
    )
    for name in list(SUBJECTS)[: 1 if quick else None]:
        measure(name, 4 if quick else 16, report)
    return report
