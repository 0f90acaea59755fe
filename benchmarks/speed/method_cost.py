"""Cost of every method of the registry: a prefill of 4096 tokens and decoding behind it, against plain attention.

A prefill is one forward. Decoding is one request to the engine, as in the server. A cache of transformers would copy
all keys in each step, which costs as much as attention.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from transformers import GPT2Config, PreTrainedModel, XGLMConfig

from benchmarks.models import llama, random_model
from benchmarks.speed.generate_speed import concurrent, serving
from benchmarks.timing import Report, Timings, interleaved
from benchmarks.typical import Fields, typical
from patches import METHODS, Method, Patched, encode, parse, patched
from service.engine.engine import Engine
from service.engine.limits import EngineLimits
from service.engine.thread.cpu import Wake, generation_thread
from service.models import architecture
from service.models.linear.layers import use_fastest

TOKENS = 4096
DECODED = 48
STEPS = 5
"""Rounds of decoding."""
GOAL = 1.6
PLAIN = {"relative": {"method": "none"}}
"""The encoding that methods are compared with, by family, if not the model's default. Learned vectors for distances
cost something themselves."""
ONE_MODEL = {"bias": "rotary", "none": "rotary"}
"""Families that are measured on the model of another: they add nothing that has weights."""


def run(quick: bool = False) -> Report:
    """One row per method, each timed in turns with plain attention on the same model."""
    torch.set_num_threads(2)
    tokens, rounds = (64, 1) if quick else (TOKENS, 3)
    report = Report(
        "method_cost",
        f"each method against plain attention, prefill of {tokens} tokens and decoding behind it, 4 layers of 4 heads "
        f"of 64, random weights. Goal: methods with several bands at most {GOAL} on prefill",
        ("method", "bands", "prefill", "prefill / plain", "middle half", "token", "token / plain", "middle half"),
    )
    ratios = {}
    for family, model in models():
        use_fastest(model)
        with patched(model) as patch:
            for fields in requests(patch, family):
                bands, ratio = measure(patch, PLAIN.get(patch.geometry.family), fields, (tokens, rounds), report)
                ratios[str(fields["method"])] = (bands, ratio)
    banded = {name: ratio for name, (bands, ratio) in ratios.items() if bands > 1}
    worst = max(banded, key=lambda name: banded[name])
    over = [name for name, ratio in banded.items() if ratio > GOAL]
    report.notes.append(
        f"of {len(banded)} methods with several bands {worst} costs most on prefill, {banded[worst]:.2f} times plain; "
        + (f"over {GOAL}: {', '.join(over)}" if over else f"none is over {GOAL}")
    )
    report.notes.append("typical parameters for 16 times a trained length of 256 tokens (benchmarks/typical.py)")
    report.notes.append("learned and sinusoidal: on a GPT-2 and an XGLM of the same shape")
    report.notes.append("shaw and transformer_xl: on the demo architecture and against none")
    return report


def models() -> Iterator[tuple[str, PreTrainedModel]]:
    """Family, or method that only one model can take, and a model of the same shape for it."""
    architecture.register()
    sizes: dict[str, Any] = {"num_hidden_layers": 4, "num_key_value_heads": 4}
    yield "rotary", random_model(llama(**sizes))
    ends: dict[str, Any] = {"vocab_size": 2048, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    yield "learned", random_model(GPT2Config(n_embd=256, n_layer=4, n_head=4, n_inner=704, n_positions=8192, **ends))
    yield (
        "sinusoidal",
        random_model(
            XGLMConfig(
                d_model=256,
                num_layers=4,
                attention_heads=4,
                ffn_dim=704,
                max_position_embeddings=8192,
                dropout=0.0,
                **ends,
            )
        ),
    )
    for name in ("shaw", "transformer_xl"):
        fields = llama(**sizes).to_dict() | {"position_family": name, "head_dim": 64}
        del fields["model_type"], fields["architectures"]
        yield name, random_model(architecture.RopewayDemoConfig(**fields))


def requests(patch: Patched, family: str) -> list[Fields]:
    """Those of the registry that are measured on this model, one per method."""
    return [
        fields
        for name, fields in typical(patch.geometry).items()
        if family in (name, ONE_MODEL.get(METHODS[name].family, METHODS[name].family))
    ]


def measure(
    patch: Patched, plain: Fields | None, fields: Fields, size: tuple[int, int], report: Report
) -> tuple[int, float]:
    """Add the method's row; returns its number of bands and its ratio on prefill."""
    length, rounds = size
    warmup = min(1, rounds - 1)
    model, vocab = patch.model, patch.model.config.vocab_size
    tokens = torch.randint(3, vocab, (1, length), generator=torch.Generator().manual_seed(0))
    methods = {"plain": parse(plain or {"method": "default"}), "method": parse(fields)}
    resolved = {name: patch.resolve(method, length + DECODED) for name, method in methods.items()}
    slots = {name: patch.slots.acquire(each) for name, each in resolved.items()}
    prefills = {name: prefill(model, tokens, slot) for name, slot in slots.items()}
    with generation_thread(Wake()):
        once = interleaved(prefills, rounds, warmup)
    for slot in slots.values():
        patch.slots.release(slot)
    steps = decoding(patch, methods, length, STEPS if rounds > 1 else 1)
    bands, ratio = len(resolved["method"].recipe.bands), once.ratio("method", "plain")
    report.add(
        fields["method"],
        bands,
        f"{once.median('method'):.3f} s",
        f"{ratio:.2f}",
        once.spread("method", "plain"),
        f"{1e3 * steps.median('method'):.2f} ms",
        f"{steps.ratio('method', 'plain'):.2f}",
        steps.spread("method", "plain"),
    )
    return bands, ratio


def prefill(model: PreTrainedModel, tokens: torch.Tensor, slot: int) -> Callable[[], torch.Tensor]:
    """A run of one pass over ``tokens`` [1, n] without a cache."""
    position_ids = encode(torch.arange(tokens.shape[1])[None], slot)

    @torch.no_grad()
    def once() -> torch.Tensor:
        logits: torch.Tensor = model(
            input_ids=tokens, position_ids=position_ids, use_cache=False, logits_to_keep=1
        ).logits
        return logits

    return once


def decoding(patch: Patched, methods: dict[str, Method], length: int, rounds: int) -> Timings:
    """Seconds per token of one stream behind a prompt of ``length`` tokens, another one in each run."""
    generator, vocab = torch.Generator().manual_seed(0), patch.model.config.vocab_size
    limits = EngineLimits(cache_tokens=4 * (length + DECODED), score_tokens=length)
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    with serving(patch, limits) as (loop, engine):
        for number in range(rounds + 1):
            for name in sorted(methods, reverse=number % 2 == 1):
                prompt = torch.randint(3, vocab, (length,), generator=generator).tolist()
                token_s = loop.run(per_token(engine, prompt, methods[name]))
                if number:  # the first round has warmed everything up
                    seconds[name].append(token_s)
    return Timings(seconds)


async def per_token(engine: Engine, prompt: list[int], method: Method) -> float:
    """The median of seconds between tokens of one request."""
    arrivals: list[float] = []
    await concurrent(engine, [prompt], [method], DECODED, lambda *_: arrivals.append(time.perf_counter()))
    return statistics.median(after - before for before, after in pairwise(arrivals))
