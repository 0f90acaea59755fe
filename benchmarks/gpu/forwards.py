"""Rates of the device, and forwards as shares of them: prefill, decode steps through a cache, scoring."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu.decoding import LONG
from benchmarks.gpu.scale import Row, Scale, decoded_weights, peak, random_ids, reset_peak, twin_of
from benchmarks.models import cached_bytes_per_token
from benchmarks.speed.patched_overhead import DECODED, decoder, prefill
from benchmarks.timing import finish, interleaved
from patches import parse, patched
from service.evaluation.scoring import token_scores


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


def scoring_rate(scale: Scale) -> Iterator[Row]:
    """Scoring one long text as served, as a share of the matrix rate, and under bands against plain."""
    for name in ("8B", "1B"):
        yield from scored(scale, name)


def scored(scale: Scale, name: str) -> Iterator[Row]:
    model = scale.model(name)
    config, tokens = model.config, scale.score_tokens
    token_ids = random_ids(scale, tokens).tolist()
    attention = 2 * tokens**2 * config.num_attention_heads * config.head_dim * config.num_hidden_layers  # causal half
    operations = 2 * tokens * decoded_weights(model) / model.dtype.itemsize + attention
    held = sum(weight.nbytes for weight in model.parameters()) + tokens * cached_bytes_per_token(model)
    with patched(model) as patch:
        if scale.device == "cuda":
            patch.read_in_place()  # as served
        plain = float("nan")
        for what, fields in LONG.items():
            slot = patch.slots.acquire(patch.resolve(parse(fields), tokens))
            run = lambda slot=slot: finish(token_scores.token_nll(patch, token_ids, slot, None))  # noqa: E731
            run()
            reset_peak(scale)
            seconds = interleaved({"run": run}, 2, warmup=0).median("run")
            plain = seconds if what == "default" else plain
            remark = (
                f"{operations / seconds / scale.matrix_rate:.1%} of the matrix rate, {seconds / plain:.2f} x default"
            )
            beyond = f", peak {(peak(scale) - held) / 1e6:.0f} MB beyond weights and cache" if peak(scale) else ""
            yield f"{name} scoring {tokens} tokens, {what}", seconds, "s", remark + beyond
            patch.slots.release(slot)
