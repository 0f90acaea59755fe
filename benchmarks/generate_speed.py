"""Sixteen requests with eight encodings through the engine, against one after another through ``model.generate``.

Prompts are ragged and new for every run, so that no prefix is shared. Sequential runs use transformers' own
version of an encoding where it has one. Otherwise they use the unscaled model, which is never slower.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.models import BANDED, ENCODINGS, Subject, llama, native, random_model, trained
from benchmarks.timing import Report, interleaved
from patches import Method, parse, patched
from service.engine.engine import Engine
from service.engine.limits import EngineLimits
from service.engine.request import SamplingParams

REQUESTS = 16
NEW_TOKENS = 64
PROMPTS = [24, 150, 61, 97, 12, 180, 45, 133, 70, 31, 110, 88, 16, 160, 53, 120]
"""Prompt lengths in tokens."""


@dataclass
class Prompts:
    """Random prompts of fixed lengths, never the same twice."""

    vocab: int
    seed: int = 0

    def __call__(self) -> list[list[int]]:
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.randint(3, self.vocab - 8, (n,), generator=generator).tolist() for n in PROMPTS]


async def concurrent(
    engine: Engine, prompts: Sequence[list[int]], methods: Sequence[Method], new_tokens: int = NEW_TOKENS
) -> list[list[int]]:
    """New tokens of every request, all in flight together."""

    async def one(prompt: list[int], method: Method) -> list[int]:
        token_ids: list[int] = []
        resolved = engine.patch.resolve(method, len(prompt) + new_tokens)
        steps = engine.generate(prompt, resolved, SamplingParams(), new_tokens, pe_method=method.method)
        async for generation in steps:
            token_ids = generation.token_ids
        return token_ids

    return await asyncio.gather(*(one(*pair) for pair in zip(prompts, methods, strict=True)))


def one_by_one(models: Sequence[PreTrainedModel], prompts: Sequence[list[int]]) -> list[list[int]]:
    """New tokens of every request through ``generate``, greedily."""
    answers = []
    for model, prompt in zip(models, prompts, strict=True):
        output = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
        answers.append(output[0, len(prompt) :].tolist())
    return answers


def methods_of(encodings: Sequence[dict[str, Any]], requests: int = REQUESTS) -> list[Method]:
    """One method per request, in turn."""
    return [parse(encoding) for encoding in itertools.islice(itertools.cycle(encodings), requests)]


def measure(subject: Subject, rounds: int, report: Report) -> None:
    """Add the subject's rows to the report."""
    prompts = Prompts(subject.model.config.vocab_size)
    plain = native(subject.model, {"method": "default"})
    assert plain is not None
    twins = [native(subject.model, encoding) or plain for encoding in ENCODINGS]
    sequential = [twins[index % len(twins)] for index in range(REQUESTS)]
    uniform, mixed, banded = methods_of(ENCODINGS[:1]), methods_of(ENCODINGS), methods_of(BANDED)
    with patched(subject.model) as patch, asyncio.Runner() as loop:

        async def start() -> Engine:
            return Engine(patch, EngineLimits(cache_tokens=32768, score_tokens=4096), ())

        engine = loop.run(start())
        try:
            given = prompts()
            same = [
                ours == theirs
                for ours, theirs, encoding in zip(
                    loop.run(concurrent(engine, given, mixed)),
                    one_by_one(sequential, given),
                    itertools.cycle(ENCODINGS),
                    strict=False,
                )
                if native(subject.model, encoding) is not None
            ]
            timings = interleaved(
                {
                    "sequential": lambda: one_by_one(sequential, prompts()),
                    "mixed": lambda: loop.run(concurrent(engine, prompts(), mixed)),
                    "uniform": lambda: loop.run(concurrent(engine, prompts(), uniform)),
                    "banded": lambda: loop.run(concurrent(engine, prompts(), banded)),
                },
                rounds,
                warmup=0,  # the comparison of tokens has warmed everything up
            )
        finally:
            engine.thread.stop(1.0)
    for name, label in (("mixed", "8 frequency encodings"), ("banded", "with self_extend and alibi")):
        report.add(
            subject.name,
            label,
            f"{timings.median(name):.2f} s",
            f"{timings.ratio('sequential', name):.2f} ({timings.spread('sequential', name)})",
            f"{timings.ratio('uniform', name):.2f} ({timings.spread('uniform', name)})",
        )
    report.notes.append(
        f"{subject.name}: one by one {timings.median('sequential'):.2f} s, uniform {timings.median('uniform'):.2f} s; "
        f"{sum(same)} of {len(same)} requests with an encoding that transformers has give its exact tokens"
    )
    if subject.note:
        report.notes.append(subject.note)


def run(quick: bool = False) -> Report:
    """The 5M-parameter random model and a trained one."""
    torch.set_num_threads(2)
    report = Report(
        "generate_speed",
        f"{REQUESTS} concurrent requests, {NEW_TOKENS} new tokens each. They are compared with model.generate one by "
        "one (goal 3) and with one encoding for all (goal 0.9)",
        ("model", "encodings", "time", "x faster than one by one", "throughput / uniform"),
    )
    rounds = 1 if quick else 5
    measure(Subject("random llama 5M", random_model(llama())), rounds, report)
    measure(trained("llama3-1m-atto"), rounds, report)
    return report
