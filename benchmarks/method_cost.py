"""Cost of every method of the registry: a prefill of 4096 tokens and decoding behind it, against plain attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import DynamicCache, GPT2Config, PreTrainedModel, XGLMConfig

from benchmarks.models import llama, random_model
from benchmarks.timing import Report, interleaved
from benchmarks.typical import Fields, typical
from patches import METHODS, Patched, encode, parse, patched
from service.engine.cpu import Wake, generation_thread
from service.models import architecture
from service.models.linear.layers import use_fastest

TOKENS = 4096
DECODED = 16
STEPS = 5
"""Rounds of decoding for each one of prefill, which takes longer."""
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
        with patched(model) as patch, generation_thread(Wake()):
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
    tokens = torch.randint(3, vocab, (1, length + DECODED), generator=torch.Generator().manual_seed(0))
    resolved = patch.resolve(parse(fields), length + DECODED)
    base = patch.resolve(parse(plain or {"method": "default"}), length + DECODED)
    slots = {"plain": patch.slots.acquire(base), "method": patch.slots.acquire(resolved)}
    prefills = {name: prefill(model, tokens[:, :length], slot) for name, slot in slots.items()}
    once = interleaved(prefills, rounds, warmup)
    decoders = {name: decoder(patch, tokens, slot) for name, slot in slots.items()}
    steps = interleaved(decoders, STEPS * rounds, warmup)
    for slot in slots.values():
        patch.slots.release(slot)
    bands, ratio = len(resolved.recipe.bands), once.ratio("method", "plain")
    report.add(
        fields["method"],
        bands,
        f"{once.median('method'):.3f} s",
        f"{ratio:.2f}",
        once.spread("method", "plain"),
        f"{1e3 * steps.median('method') / DECODED:.2f} ms",
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


@torch.no_grad()
def decoder(patch: Patched, tokens: torch.Tensor, slot: int) -> Callable[[], torch.Tensor]:
    """A run of ``DECODED`` single tokens behind all others, which leaves its cache as it found it."""
    model, past, cache = patch.model, tokens.shape[1] - DECODED, DynamicCache()

    def fed(start: int, stop: int) -> torch.Tensor:
        logits: torch.Tensor = model(
            input_ids=tokens[:, start:stop],
            position_ids=encode(torch.arange(start, stop)[None], slot),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits

    @torch.no_grad()
    def steps() -> torch.Tensor:
        for position in range(past, past + DECODED):
            logits = fed(position, position + 1)
        cache.crop(-DECODED)
        return logits

    fed(0, past)
    return steps
