"""Memory of scoring a long text beyond weights and cache; chunks change no result.

The peak is that of a separate process: VmHWM where the kernel has it, because ru_maxrss also counts
the process that started this one.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.models import cached_bytes_per_token, llama, random_model
from benchmarks.paths import ROOT
from benchmarks.timing import Report, finish
from patches import parse, patched
from service.evaluation.scoring.token_scores import token_nll

TOKENS = 16384
VOCAB = 32768


def run(quick: bool = False) -> Report:
    """Peak memory in a subprocess; differences between chunked and whole passes in this one."""
    torch.set_num_threads(2)
    report = Report(
        "scoring_memory",
        "scoring in chunks (goals: under 300 MB beyond weights and cache; within 1e-5 of one whole pass)",
        ("what", "value", "remark"),
    )
    tokens = 2048 if quick else TOKENS
    command = [sys.executable, "-m", "benchmarks.speed.scoring_memory", str(tokens)]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    memory = json.loads(answer.stdout.splitlines()[-1])
    beyond = memory["peak"] - memory["weights"] - memory["cache"]
    report.add(
        f"peak beyond weights and cache, {tokens} tokens, vocabulary {VOCAB}",
        f"{(beyond - memory['idle']) / 1e6:.0f} MB",
        f"and {memory['idle'] / 1e6:.0f} MB of interpreter and libraries before the model was there",
    )
    report.add("weights and cache", f"{(memory['weights'] + memory['cache']) / 1e6:.0f} MB", "")
    report.add(f"logits of all {tokens} tokens would be", f"{4 * tokens * VOCAB / 1e6:.0f} MB", "")
    for label, difference, chunks in chunk_differences(512 if quick else 2048):
        report.add(
            f"chunked against whole, {label}", f"{difference:.1e}", f"largest per token, relative; chunks {chunks}"
        )
    return report


def chunk_differences(tokens: int) -> list[tuple[str, float, str]]:
    """Per encoding: largest relative difference of a token's NLL, and the chunk lengths tried."""
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(3, 2048, (tokens,), generator=generator).tolist()
    chunks = (64, 300, 512)
    found = []
    with patched(random_model(llama(num_hidden_layers=2))) as patch:
        for encoding in (
            {"method": "default"},
            {"method": "yarn", "factor": 8.0},
            {"method": "self_extend", "group_size": 4, "neighbor_window": 64},
            {"method": "alibi"},
        ):
            resolved = patch.resolve(parse(encoding), tokens)
            slot = patch.slots.acquire(resolved)
            whole = finish(token_nll(patch, token_ids, slot, tokens))
            largest = max(
                float(np.max(np.abs(finish(token_nll(patch, token_ids, slot, chunk)) - whole) / whole))
                for chunk in chunks
            )
            patch.slots.release(slot)
            found.append((encoding["method"], largest, ", ".join(map(str, chunks))))
    return found


def child(tokens: int) -> dict[str, Any]:
    """Score random tokens once; bytes of weights, cache, the idle process and the peak."""
    torch.set_num_threads(2)
    warm_up()
    idle = status("VmRSS")
    model = random_model(llama(num_hidden_layers=4, vocab_size=VOCAB, tie_word_embeddings=True))
    weights = sum(weight.nbytes for weight in {id(w): w for w in model.parameters()}.values())
    token_ids = torch.randint(3, VOCAB, (tokens,)).tolist()
    with patched(model) as patch:
        for _ in token_nll(patch, token_ids, 0, 512):
            pass
    cache = tokens * cached_bytes_per_token(model)
    return {"idle": idle, "weights": weights, "cache": cache, "peak": status("VmHWM")}


def warm_up() -> None:
    """Touch what any process with a model has touched: kernels, thread pools, lazily imported modules."""
    with patched(random_model(llama(num_hidden_layers=1))) as patch:
        for _ in token_nll(patch, list(range(100)), 0, 64):
            pass


def status(field: str) -> int:
    """Bytes of a field in /proc/self/status; elsewhere the peak of getrusage."""
    path = Path("/proc/self/status")
    if not path.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    line = next(line for line in path.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    print(json.dumps(child(int(sys.argv[1]))))
