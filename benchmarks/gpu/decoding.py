"""Decode steps of every engine, timed by the difference of two lengths."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.generate_speed import concurrent, methods_of
from benchmarks.gpu.engines import BATCH_TOKENS, batching, engine_of, generate
from benchmarks.gpu.scale import Row, Scale, decoded_weights, random_ids, twin_of
from benchmarks.models import BANDED, ENCODINGS, cached_bytes_per_token
from benchmarks.timing import interleaved
from patches import patched
from service.engine.choice import EngineChoice, choices

FEW = 4
"""New tokens of the shorter of two runs whose difference is timed, once all requests decode."""

ALONE = {
    "default": ENCODINGS[:1],
    "yarn": ENCODINGS[3:4],
    "self_extend": BANDED[6:7],
    "alibi": BANDED[7:8],
}
LONG = {
    "default": {"method": "default"},
    "self_extend": {"method": "self_extend", "group_size": 8, "neighbor_window": 1024},
    "dual_chunk": {"method": "dual_chunk"},
    "alibi": {"method": "alibi"},
}
"""Encodings of a long prompt."""

MIXES = {"default": ENCODINGS[:1], "8 encodings": ENCODINGS, "8 with self_extend and alibi": BANDED}
"""Encodings of the requests of a batch, in turn."""


def decode_1b(scale: Scale) -> Iterator[Row]:
    """Decode steps of the 1B shape."""
    for batch in scale.batches:
        yield from decode(scale, "1B", batch, limit_s=20)


def decode_8b(scale: Scale) -> Iterator[Row]:
    """Decode steps of the 8B shape: one request, and many with longer prompts."""
    alone, crowd = scale.batches
    yield from decode(scale, "8B", alone, limit_s=30)
    yield from decode(replace(scale, prompt=scale.crowded_prompt, rounds=2), "8B", crowd, limit_s=80)


def long_context(scale: Scale) -> Iterator[Row]:
    """Prefill and decode steps of the 8B shape behind a long prompt, with bands and a bias against plain."""
    scale = replace(scale, prompt=scale.long_prompt, rounds=2)
    model = scale.model("8B")
    prompts, batch = [random_ids(scale, scale.prompt).tolist()], 1
    with patched(model) as patch, engine_of(patch, scale, batch) as (loop, engine):
        runs: dict[str, Callable[[int], object]] = {}
        for what, fields in LONG.items():
            methods = methods_of([fields], batch)
            runs[what] = lambda n, methods=methods: loop.run(concurrent(engine, prompts, methods, n))
        steps, prefills, failures = time_steps(runs, scale, 40, FEW)
    for kind, seconds, unit, factor in (("prefill", prefills, "s", 1), ("decode", steps, "ms/step", 1e3)):
        for what, taken in seconds.items():
            remark = f"{taken / seconds['default']:.2f} x default"
            yield f"8B {kind} at {scale.prompt}, {what}", factor * taken, unit, remark
    for what, error in failures.items():
        yield f"8B at {scale.prompt}, {what}", float("nan"), "s", f"failed: {error}"


def decode(scale: Scale, name: str, batch: int, limit_s: float) -> Iterator[Row]:
    """Seconds per step of every way to decode ``batch`` requests, as shares of the copy bandwidth.

    A step's time is the difference of two runs that differ by ``steps`` tokens, so prefill cancels out. The model of
    transformers has the weights of the patched one. Before, it would keep projections from being joined.
    """
    model = scale.model(name)
    read = bytes_read(scale, model, batch)
    prompts = [random_ids(scale, scale.prompt, seed).tolist() for seed in range(batch)]
    with ExitStack() as stack:
        patch = stack.enter_context(patched(model))
        twin = twin_of(model)
        loop, engine = stack.enter_context(engine_of(patch, scale, batch))
        peer = stack.enter_context(batching(twin, scale, batch))
        runs: dict[str, Callable[[int], object]] = {}
        for what, encodings in (ALONE if batch == 1 else MIXES).items():
            methods = methods_of(encodings, batch)
            runs[what] = lambda n, methods=methods: loop.run(concurrent(engine, prompts, methods, n))
        runs["transformers continuous batching"] = lambda n: peer(prompts, n)
        if batch == 1 or scale.prompt < scale.crowded_prompt:
            runs["transformers generate"] = lambda n: generate(twin, prompts, n)
        steps, _, failures = time_steps(runs, scale, limit_s, few_of(scale, batch))
    for what, seconds in steps.items():
        compared = "" if what == "default" else f", {seconds / steps['default']:.2f} x default"
        remark = f"{read / seconds / scale.copy_rate:.1%} of copy bandwidth{compared}"
        yield f"{name} batch {batch}, {what}", 1e3 * seconds, "ms/step", remark
    for what, error in failures.items():
        yield f"{name} batch {batch}, {what}", float("nan"), "ms/step", f"failed: {error}"


def few_of(scale: Scale, batch: int) -> int:
    """New tokens after which all requests decode: a step reads ``BATCH_TOKENS`` tokens of prompts."""
    return FEW + batch * scale.prompt // BATCH_TOKENS


def outside_model(scale: Scale) -> Iterator[Row]:
    """The share of a decode step that passes outside of the forward."""
    for batch in scale.batches:
        share = share_outside(scale, "1B", batch)
        yield f"1B batch {batch}, share of a step outside the model", 100 * share, "%", "without graphs"


def bytes_read(scale: Scale, model: PreTrainedModel, batch: int) -> int:
    """Bytes that a decode step of ``batch`` requests has to read."""
    context = scale.prompt + few_of(scale, batch) + scale.steps // 2
    return decoded_weights(model) + batch * context * cached_bytes_per_token(model)


def share_outside(scale: Scale, name: str, batch: int) -> float:
    """Share of a decode step's time for the manager, sampling and streaming, in an engine without graphs."""
    model = scale.model(name)
    prompts = [random_ids(scale, scale.prompt, seed).tolist() for seed in range(batch)]
    methods = methods_of(MIXES["default"], batch)
    observable = next(choice for choice in kinds(scale) if not choice.graphs)  # a replay calls no hooks
    with patched(model) as patch, engine_of(patch, scale, batch, observable) as (loop, engine):
        return manager_share(
            model, batch, lambda: loop.run(concurrent(engine, prompts, methods, few_of(scale, batch) + scale.steps))
        )


def kinds(scale: Scale) -> list[EngineChoice]:
    """Our paged engines on the device, from the fastest to the slowest."""
    every = choices("triton" if scale.device == "cuda" else "eager", torch.device(scale.device))
    return [choice for choice in every if choice.kind == "paged"]


def attentions(scale: Scale) -> Iterator[Row]:
    """Decode steps of the 1B shape, all requests at once: attention over block tables against one by one."""
    compared = [choice for choice in kinds(scale) if not choice.graphs]
    for mix, encodings in MIXES.items():
        yield from compare(scale, scale.batches[-1], mix, encodings, compared)


def graphs(scale: Scale) -> Iterator[Row]:
    """Decode steps of the 1B shape on block tables, alone and all at once.

    They run with CUDA graphs, where there are, and without.
    """
    compared = [choice for choice in kinds(scale) if choice.backend is not None]
    for batch in scale.batches:
        for mix, encodings in (ALONE if batch == 1 else MIXES).items():
            yield from compare(scale, batch, mix, encodings, compared)


def compare(
    scale: Scale, batch: int, mix: str, encodings: Sequence[dict[str, Any]], compared: Sequence[EngineChoice]
) -> Iterator[Row]:
    """Seconds per step of some engines, as shares of the copy bandwidth."""
    model = scale.model("1B")
    read, methods = bytes_read(scale, model, batch), methods_of(encodings, batch)
    prompts = [random_ids(scale, scale.prompt, seed).tolist() for seed in range(batch)]
    with patched(model) as patch, ExitStack() as engines:
        runs: dict[str, Callable[[int], object]] = {}
        for kind in compared:
            loop, engine = engines.enter_context(engine_of(patch, scale, batch, kind))
            what = kind.attention + (", graphs" if kind.graphs else "")
            runs[what] = lambda n, loop=loop, engine=engine: loop.run(concurrent(engine, prompts, methods, n))
            runs[what](1)  # two engines of one model start one after the other
        steps, _, failures = time_steps(runs, scale, 15, few_of(scale, batch))
    for what, seconds in steps.items():
        others = "".join(f", {seconds / steps[other]:.2f} x {other}" for other in steps if other != what)
        remark = f"{read / seconds / scale.copy_rate:.1%} of copy bandwidth{others}"
        yield f"1B batch {batch}, {mix}, {what}", 1e3 * seconds, "ms/step", remark
    for what, error in failures.items():
        yield f"1B batch {batch}, {mix}, {what}", float("nan"), "ms/step", f"failed: {error}"


def time_steps(
    runs: dict[str, Callable[[int], object]], scale: Scale, limit_s: float, few: int
) -> tuple[dict[str, float], dict[str, float], dict[str, str]]:
    """Median seconds per decode step of each run, those of its shorter runs, and errors of those that cannot run."""
    working: dict[str, Callable[[], object]] = {}
    failures = {}
    for what, run in runs.items():
        try:
            run(few + scale.steps)
        except Exception as error:
            failures[what] = f"{type(error).__name__}: {str(error)[:100]}"
            continue
        working[f"{what}, few"] = lambda run=run: run(few)
        working[f"{what}, many"] = lambda run=run: run(few + scale.steps)
    seconds = interleaved(working, scale.rounds, warmup=0, limit_s=limit_s).seconds
    steps, short = {}, {}
    for what in (each for each in runs if each not in failures):
        rounds = zip(seconds[f"{what}, few"], seconds[f"{what}, many"], strict=True)
        steps[what] = statistics.median(many - few for few, many in rounds) / scale.steps
        short[what] = statistics.median(seconds[f"{what}, few"])
    return steps, short, failures


def manager_share(model: PreTrainedModel, batch: int, run: Callable[[], object]) -> float:
    """Median share of a decode step's time that passes outside the model's forward."""
    spans: list[list[float]] = []

    def enter(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        synchronize()
        spans.append([kwargs["input_ids"].shape[-1], time.perf_counter(), 0.0])

    def leave(*_: Any) -> None:
        synchronize()
        spans[-1][2] = time.perf_counter()

    hooks = (model.register_forward_pre_hook(enter, with_kwargs=True), model.register_forward_hook(leave))
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    steps = [(a, b) for a, b in itertools.pairwise(spans) if a[0] == b[0] <= batch]
    largest = max(a[0] for a, _ in steps)  # below `batch` where the sequences never decode all at once
    return statistics.median((b[1] - a[2]) / (b[1] - a[1]) for a, b in steps if a[0] == largest)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
