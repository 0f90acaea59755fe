"""Patched ``default`` against the unpatched model: a prefill of 2048 tokens, and decoding through a cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import DynamicCache, PreTrainedModel

from benchmarks.models import llama, native, random_model
from benchmarks.timing import Report, interleaved
from patches import patched

PREFILL = 2048
DECODED = 16


def run(quick: bool = False) -> Report:
    """Ratio of medians on the 5M-parameter random model; outputs must be equal to the bit."""
    torch.set_num_threads(2)
    report = Report(
        "patched_overhead",
        "patched default against unpatched, 5M-parameter llama (goal: within 3 %)",
        ("forward", "unpatched", "patched / unpatched", "middle half", "outputs"),
    )
    plain = random_model(llama(max_position_embeddings=4096))
    served = native(plain, {"method": "default"})
    assert served is not None
    tokens = torch.randint(3, 2048, (1, PREFILL), generator=torch.Generator().manual_seed(0))
    rounds = 3 if quick else 21
    with patched(served):
        runs = {"unpatched": lambda: prefill(plain, tokens), "patched": lambda: prefill(served, tokens)}
        report.add(f"prefill {PREFILL}", *figures(runs, rounds, 1))
        for rows, past in ((1, 64), (1, 1024), (8, 256)):
            prompt = tokens[:, :past].expand(rows, -1)
            runs = {"unpatched": decoder(plain, prompt), "patched": decoder(served, prompt)}
            report.add(f"decode, {rows} row(s), {past} in cache", *figures(runs, rounds, DECODED))
    return report


@torch.no_grad()
def prefill(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits


@torch.no_grad()
def decoder(model: PreTrainedModel, prompt: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A run of ``DECODED`` steps behind ``prompt``, which leaves its cache as it found it."""
    cache = DynamicCache()
    model(input_ids=prompt, cache=cache, use_cache=True, logits_to_keep=1)

    @torch.no_grad()
    def steps() -> torch.Tensor:
        for step in range(DECODED):
            logits = model(input_ids=prompt[:, step : step + 1], cache=cache, use_cache=True).logits
        cache.crop(-DECODED)
        return logits

    return steps


def figures(runs: dict[str, Callable[[], torch.Tensor]], rounds: int, steps: int) -> tuple[str, ...]:
    equal = torch.equal(*(run() for run in runs.values()))
    timings = interleaved(runs, rounds)
    return (
        f"{1e3 * timings.median('unpatched') / steps:.2f} ms",
        f"{timings.ratio('patched', 'unpatched'):.3f}",
        timings.spread("patched", "unpatched"),
        "equal to the bit" if equal else "DIFFERENT",
    )
