"""Decode steps of every engine, and the peak memory of a long request."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel

from benchmarks.gpu.engines import BATCH_TOKENS, answers, batching, cache_room, engine_of, generate
from benchmarks.gpu.scale import Row, Scale, decoded_weights, peak, random_ids, reset_peak, twin_of
from benchmarks.gpu.steps import Run, time_steps
from benchmarks.models import BANDED, ENCODINGS, cached_bytes_per_token
from benchmarks.speed.generate_speed import concurrent, methods_of
from patches import patched
from service.engine.choice import EngineChoice, choices
from service.models.memory.cache_size import cache_bytes_per_token

FEW = 4
"""New tokens of every request once all of them decode, before steps are timed."""

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
    """Decode steps of one request of the 8B shape."""
    yield from decode(scale, "8B", scale.batches[0], limit_s=30)


def crowd_8b(scale: Scale) -> Iterator[Row]:
    """Decode steps of many requests of the 8B shape, with longer prompts."""
    yield from decode(replace(scale, prompt=scale.crowded_prompt, rounds=2), "8B", scale.batches[-1], limit_s=80)


def long_context(scale: Scale) -> Iterator[Row]:
    """Prefill and decode steps of the 8B shape behind a long prompt, with bands and a bias against plain."""
    scale = replace(scale, prompt=scale.long_prompt, rounds=2)
    model = scale.model("8B")
    prompts, batch = [random_ids(scale, scale.prompt).tolist()], 1
    with patched(model) as patch, engine_of(patch, scale, batch) as (loop, engine):
        runs = {
            what: partial(answers, loop, engine, prompts, methods_of([fields], batch)) for what, fields in LONG.items()
        }
        seconds, failures = time_steps(runs, scale, 40, FEW)
    for what, taken in seconds.items():
        ratios = [ours / plain for ours, plain in zip(taken, seconds["default"], strict=True)]
        yield f"8B prefill at {scale.prompt}, {what}", taken.prefill, "s", f"{ratios[0]:.2f} x default"
        yield f"8B decode at {scale.prompt}, {what}", 1e3 * taken.step, "ms/step", f"{ratios[1]:.2f} x default"
    for what, error in failures.items():
        yield f"8B at {scale.prompt}, {what}", float("nan"), "s", f"failed: {error}"


def windows(scale: Scale) -> Iterator[Row]:
    """Decode steps of Gemma 3's 1B shape behind a long prompt: five of six layers keep, and read, a window alone."""
    scale = replace(scale, prompt=scale.long_prompt, rounds=2)
    with torch.device(scale.device):
        model = Gemma3ForCausalLM._from_config(Gemma3TextConfig(**scale.windowed), dtype=scale.dtype)
    prompts, batch = [random_ids(scale, scale.prompt).tolist()], 1
    with patched(model.eval().requires_grad_(False)) as patch, engine_of(patch, scale, batch) as (loop, engine):
        runs = {
            what: partial(answers, loop, engine, prompts, methods_of([fields], batch)) for what, fields in LONG.items()
        }
        seconds, failures = time_steps(runs, scale, 90, FEW)  # heads of 256 compile here
        length, kinds_of_layers = scale.prompt + FEW, model.config.layer_types
        per_layer = cache_bytes_per_token(patch) / len(kinds_of_layers)
        reserved = engine.max_cached_len(patch.resolve("default", length), length) / length
    reached = {"sliding_attention": min(length, model.config.sliding_window), "full_attention": length}
    read = decoded_weights(model) + per_layer * sum(reached[kind] for kind in kinds_of_layers)
    yield f"memory of {length} tokens", 100 * reserved, "%", "of the keys of all layers"
    for what, (_, step) in seconds.items():
        yield f"decode, {what}", 1e3 * step, "ms/step", f"{read / step / scale.copy_rate:.1%} of copy bandwidth"
    for what, error in failures.items():
        yield f"decode, {what}", float("nan"), "ms/step", f"failed: {error}"


def memory_128k(scale: Scale) -> Iterator[Row]:
    """Peak memory of the 8B shape beyond weights and cache, while a request of 131,072 tokens is read and answered."""
    scale = replace(scale, prompt=scale.longest_prompt)
    model = scale.model("8B")
    prompts, batch = [random_ids(scale, scale.prompt).tolist()], 1
    held = sum(weight.nbytes for weight in model.parameters()) + cache_room(scale, batch) * cached_bytes_per_token(
        model
    )
    with patched(model) as patch, engine_of(patch, scale, batch) as (loop, engine):
        for what in ("default", "self_extend"):
            reset_peak(scale)
            began = time.perf_counter()
            loop.run(concurrent(engine, prompts, methods_of([LONG[what]], batch), FEW))
            beyond = (peak(scale) - held) / 1e6 if peak(scale) else float("nan")
            yield f"8B {scale.prompt} tokens, {what}", beyond, "MB", f"{time.perf_counter() - began:.1f} s"


def decode(scale: Scale, name: str, batch: int, limit_s: float) -> Iterator[Row]:
    """Seconds per step of every way to decode ``batch`` requests, as shares of the copy bandwidth.

    The model of transformers has the weights of the patched one. Before, it would keep projections from being joined.
    """
    model = scale.model(name)
    read = bytes_read(scale, model, batch)
    prompts = [random_ids(scale, scale.prompt, seed).tolist() for seed in range(batch)]
    with ExitStack() as stack:
        patch = stack.enter_context(patched(model))
        twin = twin_of(model)
        loop, engine = stack.enter_context(engine_of(patch, scale, batch))
        peer = stack.enter_context(batching(twin, scale, batch))
        runs: dict[str, Run] = {
            what: partial(answers, loop, engine, prompts, methods_of(encodings, batch))
            for what, encodings in (ALONE if batch == 1 else MIXES).items()
        }
        runs["transformers continuous batching"] = partial(peer, prompts)
        if batch == 1 or scale.prompt < scale.crowded_prompt:
            runs["transformers generate"] = partial(generate, twin, prompts)
        seconds, failures = time_steps(runs, scale, limit_s, few_of(scale, batch))
    for what, (_, step) in seconds.items():
        compared = "" if what == "default" else f", {step / seconds['default'].step:.2f} x default"
        remark = f"{read / step / scale.copy_rate:.1%} of copy bandwidth{compared}"
        yield f"{name} batch {batch}, {what}", 1e3 * step, "ms/step", remark
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
        runs: dict[str, Run] = {}
        for kind in compared:
            loop, engine = engines.enter_context(engine_of(patch, scale, batch, kind))
            what = kind.attention + (", graphs" if kind.graphs else "")
            runs[what] = partial(answers, loop, engine, prompts, methods)
            runs[what](1)  # two engines of one model start one after the other
        seconds, failures = time_steps(runs, scale, 15, few_of(scale, batch))
    for what, (_, step) in seconds.items():
        others = "".join(f", {step / seconds[other].step:.2f} x {other}" for other in seconds if other != what)
        remark = f"{read / step / scale.copy_rate:.1%} of copy bandwidth{others}"
        yield f"1B batch {batch}, {mix}, {what}", 1e3 * step, "ms/step", remark
    for what, error in failures.items():
        yield f"1B batch {batch}, {mix}, {what}", float("nan"), "ms/step", f"failed: {error}"


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
