"""The measurements of the GPU suite. Each takes a scale and yields rows (what, value, unit, remark).

A share compares with a measurement on the same card. For a decode step, the bytes that must move are compared with
a copy (read and write counted); for a scoring pass, operations are compared with a large matrix product.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaForCausalLM, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager

from benchmarks.generate_speed import concurrent, methods_of
from benchmarks.models import BANDED, ENCODINGS, cached_bytes_per_token, llama, native
from benchmarks.patched_overhead import DECODED, decoder, prefill
from benchmarks.scoring_equality import finish
from benchmarks.timing import interleaved
from patches import Patched, patched
from service.engine.choice import EngineChoice, choices
from service.engine.engine import Engine
from service.engine.limits import EngineLimits
from service.evaluation import chunks, scoring

Row = tuple[str, float, str, str]

FEW = 4
"""New tokens of the shorter of two runs whose difference is timed."""

ALONE = {
    "default": ENCODINGS[:1],
    "yarn": ENCODINGS[3:4],
    "self_extend": BANDED[6:7],
    "alibi": BANDED[7:8],
}
MIXES = {"default": ENCODINGS[:1], "8 encodings": ENCODINGS, "8 with self_extend and alibi": BANDED}
"""Encodings of the requests of a batch, in turn."""

LLAMA_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": True,
}
LLAMA_8B = LLAMA_1B | {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "tie_word_embeddings": False,
}


@dataclass
class Scale:
    """Sizes of models and work. ``copy_rate`` (bytes/s) and ``matrix_rate`` (operations/s) are measured first."""

    device: str
    dtype: torch.dtype
    shapes: dict[str, dict[str, Any]]
    prompt: int = 512
    steps: int = 64
    batches: tuple[int, ...] = (1, 64)
    rounds: int = 3
    prefill: int = 2048
    score_tokens: int = 32768
    copy_bytes: int = 2 << 30
    matrix: int = 8192
    copy_rate: float = float("nan")
    matrix_rate: float = float("nan")
    _models: dict[str, LlamaForCausalLM] = field(default_factory=dict)

    def model(self, name: str) -> LlamaForCausalLM:
        """Random weights of shape ``name``, made on the device; only the last one stays in memory."""
        if name not in self._models:
            self._models.clear()
            with torch.device(self.device):
                model = LlamaForCausalLM._from_config(llama(**self.shapes[name]), dtype=self.dtype)
            self._models[name] = model.eval().requires_grad_(False)
        return self._models[name]


GPU = Scale("cuda", torch.bfloat16, {"1B": LLAMA_1B, "8B": LLAMA_8B})
_TINY = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}
SMOKE = Scale(
    "cpu",
    torch.float32,
    {"1B": _TINY | {"tie_word_embeddings": True}, "8B": _TINY | {"num_hidden_layers": 3}},
    prompt=16,
    steps=4,
    batches=(1, 3),
    rounds=1,
    prefill=64,
    score_tokens=96,
    copy_bytes=1 << 20,
    matrix=64,
)


def roofline(scale: Scale) -> Iterator[Row]:
    """The device's best rates: copying memory, multiplying large matrices."""
    source = torch.empty(scale.copy_bytes, dtype=torch.uint8, device=scale.device)
    target = torch.empty_like(source)
    factors = [torch.randn(scale.matrix, scale.matrix, device=scale.device).to(scale.dtype) for _ in range(2)]
    scale.copy_rate = 2 * scale.copy_bytes / best(lambda: target.copy_(source))
    scale.matrix_rate = 2 * scale.matrix**3 / best(lambda: factors[0] @ factors[1])
    yield "copy bandwidth", scale.copy_rate / 1e9, "GB/s", "read and write counted"
    yield f"matrix rate, {scale.dtype}".replace("torch.", ""), scale.matrix_rate / 1e12, "TFLOP/s", f"{scale.matrix}^3"


def best(run: Callable[[], object], repeats: int = 20) -> float:
    """Fewest seconds of one run."""
    return min(interleaved({"run": run}, repeats, warmup=3).seconds["run"])


def patched_forward(scale: Scale) -> Iterator[Row]:
    """Patched default against unpatched: one prefill, and decode steps through transformers' cache."""
    model, twin = scale.model("1B"), twin_of(scale.model("1B"))
    tokens = random_ids(scale, scale.prefill)[None]
    with patched(model):
        runs = {f"prefill {scale.prefill}": [lambda m=m: prefill(m, tokens) for m in (twin, model)]}
        for batch in scale.batches:
            prompt = tokens[:, : max(scale.prompt, DECODED)].expand(batch, -1)
            runs[f"decode, {batch} row(s)"] = [decoder(m, prompt) for m in (twin, model)]
        for what, (unpatched, ours) in runs.items():
            equal = "equal to the bit" if torch.equal(unpatched(), ours()) else "outputs differ"
            timings = interleaved({"unpatched": unpatched, "patched": ours}, 10 * scale.rounds, limit_s=10)
            yield f"1B {what}, patched / unpatched", timings.ratio("patched", "unpatched"), "x", equal


def decode_1b(scale: Scale) -> Iterator[Row]:
    """Decode steps of the 1B shape."""
    for batch in scale.batches:
        yield from decode(scale, "1B", batch, limit_s=20)


def decode_8b(scale: Scale) -> Iterator[Row]:
    """Decode steps of the 8B shape."""
    for batch in scale.batches:
        yield from decode(scale, "8B", batch, limit_s=30)


def decode(scale: Scale, name: str, batch: int, limit_s: float) -> Iterator[Row]:
    """Seconds per step of every way to decode ``batch`` requests, as shares of the copy bandwidth.

    A step's time is the difference of two runs that differ by ``steps`` tokens, so prefill cancels out.
    """
    model = scale.model(name)
    twin = twin_of(model)
    context = scale.prompt + FEW + scale.steps // 2
    read = decoded_weights(model) + batch * context * cached_bytes_per_token(model)
    prompts = [random_ids(scale, scale.prompt, seed).tolist() for seed in range(batch)]
    with (
        patched(model) as patch,
        engine_of(patch, scale, batch) as (loop, engine),
        batching(twin, scale, batch) as peer,
    ):
        runs: dict[str, Callable[[int], object]] = {}
        for what, encodings in (ALONE if batch == 1 else MIXES).items():
            methods = methods_of(encodings, batch)
            runs[what] = lambda n, methods=methods: loop.run(concurrent(engine, prompts, methods, n))
        runs["transformers continuous batching"] = lambda n: peer(prompts, n)
        runs["transformers generate"] = lambda n: generate(twin, prompts, n)
        steps, failures = time_steps(runs, scale, limit_s)
        share = manager_share(model, batch, lambda: runs["default"](FEW + scale.steps))
    for what, seconds in steps.items():
        compared = "" if what == "default" else f", {seconds / steps['default']:.2f} x default"
        remark = f"{read / seconds / scale.copy_rate:.1%} of copy bandwidth{compared}"
        yield f"{name} batch {batch}, {what}", 1e3 * seconds, "ms/step", remark
    for what, error in failures.items():
        yield f"{name} batch {batch}, {what}", float("nan"), "ms/step", f"failed: {error}"
    yield f"{name} batch {batch}, share of a step outside the model", 100 * share, "%", "manager, sampling, streaming"


def time_steps(
    runs: dict[str, Callable[[int], object]], scale: Scale, limit_s: float
) -> tuple[dict[str, float], dict[str, str]]:
    """Median seconds per decode step of each run, and the error of those that cannot run."""
    working: dict[str, Callable[[], object]] = {}
    failures = {}
    for what, run in runs.items():
        try:
            run(FEW)
        except Exception as error:
            failures[what] = f"{type(error).__name__}: {str(error)[:100]}"
            continue
        working[f"{what}, few"] = lambda run=run: run(FEW)
        working[f"{what}, many"] = lambda run=run: run(FEW + scale.steps)
    seconds = interleaved(working, scale.rounds, warmup=0, limit_s=limit_s).seconds
    steps = {}
    for what in runs.keys() - failures.keys():
        rounds = zip(seconds[f"{what}, few"], seconds[f"{what}, many"], strict=True)
        steps[what] = statistics.median(many - few for few, many in rounds) / scale.steps
    return {what: steps[what] for what in runs if what in steps}, failures


def scoring_rate(scale: Scale) -> Iterator[Row]:
    """Scoring one long text, as a share of the matrix rate: chunks as served, and longer ones."""
    model = scale.model("1B")
    config, tokens = model.config, scale.score_tokens
    token_ids = random_ids(scale, tokens).tolist()
    attention = 2 * tokens**2 * config.num_attention_heads * config.head_dim * config.num_hidden_layers  # causal half
    operations = 2 * tokens * decoded_weights(model) / model.dtype.itemsize + attention
    held = sum(weight.nbytes for weight in model.parameters()) + tokens * cached_bytes_per_token(model)
    with patched(model) as patch:
        for wanted, logits_bytes in ((512, chunks.LOGITS_BYTES), (2048, 4 * 2048 * config.vocab_size)):
            with mock.patch.object(chunks, "LOGITS_BYTES", logits_bytes):
                chunk = chunks.chunk_length(wanted, config.vocab_size)
                reset_peak(scale)
                run = lambda chunk=chunk: finish(scoring.token_nll(patch, token_ids, 0, chunk))  # noqa: E731
                seconds = interleaved({"run": run}, 1, warmup=0).median("run")
            reached = f"{operations / seconds / scale.matrix_rate:.1%} of the matrix rate"
            beyond = f", peak {(peak(scale) - held) / 1e6:.0f} MB beyond weights and cache" if peak(scale) else ""
            yield f"1B scoring {tokens} tokens, chunks of {chunk}", seconds, "s", reached + beyond


def attentions(scale: Scale) -> Iterator[Row]:
    """Decode steps of the 1B shape, all requests at once: attention over block tables against one by one."""
    model, batch = scale.model("1B"), scale.batches[-1]
    every = choices("triton" if scale.device == "cuda" else "eager", torch.device(scale.device))
    kinds = [choice for choice in every if choice.kind == "paged"]
    prompts = [random_ids(scale, scale.prompt, seed).tolist() for seed in range(batch)]
    for mix, encodings in MIXES.items():
        methods = methods_of(encodings, batch)
        with patched(model) as patch, ExitStack() as engines:
            runs: dict[str, Callable[[int], object]] = {}
            for kind in kinds:
                loop, engine = engines.enter_context(engine_of(patch, scale, batch, kind))
                runs[kind.attention] = lambda n, loop=loop, engine=engine, methods=methods: loop.run(
                    concurrent(engine, prompts, methods, n)
                )
                runs[kind.attention](1)  # two engines of one model start one after the other
            steps, failures = time_steps(runs, scale, limit_s=15)
        for what, seconds in steps.items():
            others = [steps[other] for other in steps if other != what]
            remark = f"{seconds / others[0]:.2f} x the other" if others else ""
            yield f"1B batch {batch}, {mix}, {what}", 1e3 * seconds, "ms/step", remark
        for what, error in failures.items():
            yield f"1B batch {batch}, {mix}, {what}", float("nan"), "ms/step", f"failed: {error}"


# Pieces


def twin_of(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a second, unpatched model."""
    twin = native(model, {"method": "default"})
    assert twin is not None
    return twin


def decoded_weights(model: PreTrainedModel) -> int:
    """Bytes of weights that every decode step reads: all but an embedding table that is only looked up."""
    total = sum(weight.nbytes for weight in model.parameters())
    return total if model.config.tie_word_embeddings else total - model.get_input_embeddings().weight.nbytes


def random_ids(scale: Scale, count: int, seed: int = 0) -> torch.Tensor:
    vocab = min(shape["vocab_size"] for shape in scale.shapes.values())
    ids = torch.randint(3, vocab, (count,), generator=torch.Generator().manual_seed(seed))
    return ids.to(scale.device)


def reset_peak(scale: Scale) -> None:
    if scale.device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak(scale: Scale) -> int:
    """Most bytes allocated since ``reset_peak``; 0 without a card."""
    return torch.cuda.max_memory_allocated() if scale.device == "cuda" else 0


@contextmanager
def engine_of(
    patch: Patched, scale: Scale, batch: int, choice: EngineChoice | None = None
) -> Iterator[tuple[asyncio.Runner, Engine]]:
    """Our engine, ``choice`` or with the kernel where there is one, and the event loop that it lives in.

    It has room for ``batch`` requests, and shares no prefixes.
    """
    limits = EngineLimits(
        cache_tokens=cache_room(scale, batch), score_tokens=1024, max_batch_tokens=4096, prefix_sharing=False
    )

    chosen = choice or choices("triton" if scale.device == "cuda" else "segments", torch.device(scale.device))[0]

    async def start() -> Engine:
        return Engine(patch, limits, (), choice=chosen)

    with asyncio.Runner() as loop:
        engine = loop.run(start())
        try:
            yield loop, engine
        finally:
            engine.thread.stop(1.0)


def cache_room(scale: Scale, batch: int) -> int:
    pages = -(-(scale.prompt + scale.steps + 64) // 32)
    return 32 * pages * batch


@contextmanager
def batching(model: PreTrainedModel, scale: Scale, batch: int) -> Iterator[Callable[[list[list[int]], int], None]]:
    """transformers' own continuous batching with its SDPA attention, at the same sizes."""
    config = ContinuousBatchingConfig(
        page_size=32,
        num_blocks=cache_room(scale, batch) // 32,
        max_batch_tokens=4096,
        max_requests_per_batch=128,
        allow_block_sharing=False,
        auto_switch_to_flash=False,
    )
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1)
    started: list[ContinuousBatchingManager] = []

    def run(prompts: list[list[int]], new_tokens: int) -> None:
        if not started:  # here and not above, so that a failure to start is this run's failure
            started.append(model.init_continuous_batching(greedy, config))
            started[0].start()
        answer(started[0], prompts, new_tokens)

    try:
        yield run
    finally:
        for manager in started:
            manager.stop(block=True, timeout=5)


def answer(manager: ContinuousBatchingManager, prompts: list[list[int]], new_tokens: int) -> None:
    """Hand all prompts over and wait for the last answer."""
    manager.add_requests(prompts, max_new_tokens=new_tokens)
    waiting, deadline = len(prompts), time.monotonic() + 60
    while waiting:
        result = manager.get_result(timeout=1)
        if result is not None and result.error is not None:
            raise RuntimeError(result.error)
        waiting -= result is not None and result.is_finished()
        if result is None and (not manager.is_running() or time.monotonic() > deadline):
            raise RuntimeError(f"no answer: {manager.background_thread_status.fatal_error}")


def generate(model: PreTrainedModel, prompts: Sequence[list[int]], new_tokens: int) -> None:
    """One batch of equally long prompts through ``generate``."""
    ids = torch.tensor(prompts, device=model.device)
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)


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
    steps = [(a, b) for a, b in itertools.pairwise(spans) if a[0] == b[0] == batch]
    return statistics.median((b[1] - a[2]) / (b[1] - a[1]) for a, b in steps)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
