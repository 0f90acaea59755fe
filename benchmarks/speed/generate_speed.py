"""Sixteen requests with eight encodings through the engine, against one after another through ``model.generate``.

Prompts are ragged and new for every run, so that no prefix is shared. Sequential runs use transformers' own
version of an encoding where it has one. Otherwise they use the unscaled model, which is never slower.

Sequential runs are in another process. Here only the generation thread computes, as in the server: each thread that has
computed keeps OpenMP threads. Once they are more than the cores, all of them sleep between operations.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks.models import BANDED, ENCODINGS, SHAPE_28M, Subject, llama, native, random_model, trained
from benchmarks.timing import Report, interleaved
from patches import Method, Patched, parse, patched
from service.engine.choice import PAGED, EngineChoice
from service.engine.engine import Engine
from service.engine.limits import EngineLimits
from service.engine.request import SamplingParams
from service.engine.thread.cpu import end_openmp_threads
from service.models.linear.layers import use_fastest

REQUESTS = 16
NEW_TOKENS = 64
THREADS = 2
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
    engine: Engine,
    prompts: Sequence[list[int]],
    methods: Sequence[Method],
    new_tokens: int = NEW_TOKENS,
    arrived: Callable[[int, int], None] = lambda request, tokens: None,
    sampling: SamplingParams | None = None,
) -> list[list[int]]:
    """New tokens of every request, all in flight together. ``arrived`` hears how many a request has by now."""

    async def one(request: int, prompt: list[int], method: Method) -> list[int]:
        token_ids: list[int] = []
        resolved = engine.patch.resolve(method, len(prompt) + new_tokens)
        steps = engine.generate(prompt, resolved, sampling or SamplingParams(), new_tokens, pe_method=method.method)
        async for generation in steps:
            token_ids = generation.token_ids
            arrived(request, len(token_ids))
        return token_ids

    return await asyncio.gather(*(one(*each) for each in zip(range(len(prompts)), prompts, methods, strict=True)))


@contextmanager
def serving(
    patch: Patched, limits: EngineLimits, choice: EngineChoice = PAGED
) -> Iterator[tuple[asyncio.Runner, Engine]]:
    """An engine, and the event loop of its requests. Within it, this thread should not compute."""
    end_openmp_threads()  # those of this thread

    async def start() -> Engine:
        return Engine(patch, limits, (), choice=choice)

    with asyncio.Runner() as loop:
        engine = loop.run(start())
        try:
            yield loop, engine
        finally:
            engine.thread.stop(1.0)


def one_by_one(name: str, prompts: Sequence[list[int]]) -> list[list[int]]:
    """New tokens of every request through ``generate``, greedily, by the subject ``name``."""
    torch.set_num_threads(THREADS)
    answers = []
    for model, prompt in zip(itertools.cycle(_twins(name)), prompts, strict=False):
        output = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
        answers.append(output[0, len(prompt) :].tolist())
    return answers


@cache
def _twins(name: str) -> list[Any]:
    """One model for each encoding."""
    model = SUBJECTS[name]().model
    plain = native(model, {"method": "default"})
    return [native(model, encoding) or plain for encoding in ENCODINGS]


def methods_of(encodings: Sequence[dict[str, Any]], requests: int = REQUESTS) -> list[Method]:
    """One method per request, in turn."""
    return [parse(encoding) for encoding in itertools.islice(itertools.cycle(encodings), requests)]


def measure(name: str, rounds: int, report: Report) -> None:
    """Add the rows of the subject ``name`` to the report."""
    subject = SUBJECTS[name]()
    prompts = Prompts(subject.model.config.vocab_size)
    use_fastest(subject.model)
    uniform, mixed, banded = methods_of(ENCODINGS[:1]), methods_of(ENCODINGS), methods_of(BANDED)
    with ExitStack() as stack:
        patch = stack.enter_context(patched(subject.model))
        alone = stack.enter_context(ProcessPoolExecutor(1, get_context("spawn")))
        loop, engine = stack.enter_context(serving(patch, EngineLimits(cache_tokens=32768, score_tokens=4096)))
        given = prompts()
        pairs = zip(
            loop.run(concurrent(engine, given, mixed)), alone.submit(one_by_one, name, given).result(), strict=True
        )
        same = [
            ours == theirs
            for (ours, theirs), encoding in zip(pairs, itertools.cycle(ENCODINGS), strict=False)
            if native(subject.model, encoding) is not None
        ]
        timings = interleaved(
            {
                "sequential": lambda: alone.submit(one_by_one, name, prompts()).result(),
                "mixed": lambda: loop.run(concurrent(engine, prompts(), mixed)),
                "uniform": lambda: loop.run(concurrent(engine, prompts(), uniform)),
                "banded": lambda: loop.run(concurrent(engine, prompts(), banded)),
            },
            rounds,
            warmup=0,  # the comparison of tokens has warmed everything up
        )
    for kind, label in (("mixed", "8 frequency encodings"), ("banded", "with self_extend and alibi")):
        report.add(
            subject.name,
            label,
            f"{timings.median(kind):.2f} s",
            f"{timings.ratio('sequential', kind):.2f} ({timings.spread('sequential', kind)})",
            f"{timings.ratio('uniform', kind):.2f} ({timings.spread('uniform', kind)})",
        )
    report.notes.append(
        f"{subject.name}: one by one {timings.median('sequential'):.2f} s, uniform {timings.median('uniform'):.2f} s; "
        f"{sum(same)} of {len(same)} requests with an encoding that transformers has give its exact tokens"
    )
    if subject.note:
        report.notes.append(subject.note)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "random llama 5M": lambda: Subject("random llama 5M", random_model(llama())),
    "random llama 28M": lambda: Subject("random llama 28M", random_model(llama(**SHAPE_28M))),
    "llama3-1m-atto": lambda: trained("llama3-1m-atto"),
}


def run(quick: bool = False) -> Report:
    """Two random models and a trained one. Calls are a smaller part of a larger model's step."""
    torch.set_num_threads(THREADS)
    report = Report(
        "generate_speed",
        f"{REQUESTS} concurrent requests, {NEW_TOKENS} new tokens each. They are compared with model.generate one by "
        "one (goal 3) and with one encoding for all (goal 0.9)",
        ("model", "encodings", "time", "x faster than one by one", "throughput / uniform"),
    )
    for name in SUBJECTS:
        measure(name, 1 if quick else 7, report)
    return report
