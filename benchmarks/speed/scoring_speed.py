"""Scoring a long text in chunks that shrink with context, against a plain transformers loop in chunks of 512."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.models import llama, random_model
from benchmarks.timing import Report, interleaved
from patches import Patched, patched
from service.evaluation.scoring.token_scores import token_nll
from service.models.linear.layers import use_fastest

CHUNK = 512
WIDE = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4}
CASES = ((8192, 5, {}), (8192, 3, WIDE | {"intermediate_size": 1408, "vocab_size": 8192}), (65536, 1, {}))
"""Tokens, rounds, and changes of the 5M-parameter random model."""


def run(quick: bool = False) -> Report:
    """One thread: two would hide the work that waits for the other."""
    torch.set_num_threads(1)
    report = Report(
        "scoring_speed",
        "scoring a text of random tokens, against a plain transformers loop in chunks of 512 (goal 1.03)",
        ("parameters", "tokens", "plain", "ratio", "middle half", "longest chunk", "largest difference, nats"),
    )
    for tokens, rounds, changes in [(1024, 2, {})] if quick else CASES:
        plain, model = (random_model(llama(max_position_embeddings=tokens, **changes)) for _ in range(2))
        ids = torch.randint(3, 2048, (tokens,), generator=torch.Generator().manual_seed(3)).tolist()
        use_fastest(model)
        with patched(model) as patch:
            measure(plain, patch, ids, rounds, report)
    return report


def measure(plain: PreTrainedModel, patch: Patched, ids: list[int], rounds: int, report: Report) -> None:
    slot = patch.slots.acquire(patch.resolve({"method": "default"}, len(ids)))
    chunks: list[float] = []
    found: dict[str, np.ndarray] = {}

    def kept(name: str, score: Callable[[], np.ndarray]) -> Callable[[], None]:
        return lambda: found.update({name: score()})

    runs = {
        "plain": kept("plain", lambda: loop(plain, ids)),
        "ours": kept("ours", lambda: timed(patch, ids, slot, chunks)),
    }
    timings = interleaved(runs, rounds, warmup=0)
    patch.slots.release(slot)
    report.add(
        f"{sum(each.numel() for each in plain.parameters()) / 1e6:.0f}M",
        len(ids),
        f"{timings.median('plain'):.1f} s",
        timings.ratio("ours", "plain"),
        timings.spread("ours", "plain"),
        f"{max(chunks) * 1e3:.0f} ms",
        f"{np.abs(found['ours'] - found['plain']).max():.1e}",
    )


@torch.no_grad()
def loop(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
    """NLL of tokens 1 .. n-1 as a user's script computes it."""
    tokens, cache, found = torch.tensor(ids), None, []
    for start in range(0, len(ids) - 1, CHUNK):
        stop = min(start + CHUNK, len(ids) - 1)
        output = model(input_ids=tokens[None, start:stop], cache=cache, use_cache=True)
        cache = output.cache
        logprobs = output.logits[0].float().log_softmax(dim=-1)
        found.append(-logprobs.gather(-1, tokens[start + 1 : stop + 1, None])[:, 0])
    return torch.cat(found).double().numpy()


def timed(patch: Patched, ids: list[int], slot: int, chunks: list[float]) -> np.ndarray:
    """NLL by our scoring; ``chunks`` gets the seconds of each chunk."""
    steps, began = token_nll(patch, ids, slot, CHUNK), time.perf_counter()
    while True:
        try:
            next(steps)
        except StopIteration as end:
            nll: np.ndarray = end.value
            return nll
        chunks.append(time.perf_counter() - began)
        began = time.perf_counter()
