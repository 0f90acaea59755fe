"""64k tokens of one document on the CPU, inside a ceiling that is computed beforehand and that the kernel holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

TOKENS = 65_536
SCRIPT = """
import json, resource, sys
import numpy, torch
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
from patches import parse, patched
from service.evaluation.documents import from_token_ids
from service.evaluation.pass_memory import pass_bytes
from service.evaluation.perplexity.plan import PerplexityPlan
from service.evaluation.unit import Subject, evaluate

torch.set_num_threads(1)
torch.manual_seed(0)
tokens, share, chunk = int(sys.argv[1]), float(sys.argv[2]), 4096
shape = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, head_dim=16)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=256, **shape)).eval()

class Bytes:
    def decode(self, ids, **_):
        return "x" * len(ids)

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

def measured(patch, n):
    ids = torch.randint(0, 64, (n,)).tolist()
    plan = PerplexityPlan(
        model="m", trained_length=256, subjects=[Subject(parse({"method": "default"}), patch, "m")],
        documents=[from_token_ids("d", ids, Bytes())], lengths=[256, n], protocol="curve", stride=0, tail=0, bos=None,
        chunk=chunk,
    )
    work = evaluate(plan)
    try:
        while True:
            next(work)
    except StopIteration as stop:
        return stop.value

with patched(model) as patch:
    measured(patch, 512)
    needed = pass_bytes(patch, tokens, chunk)
    before = status("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (before + int(needed * share),) * 2)
    try:
        result = measured(patch, tokens)
    except (RuntimeError, MemoryError) as error:
        print(json.dumps({"failed": str(error)[:200], "needed": needed}))
    else:
        (at,) = (at for at in result.methods[0].lengths if at.length == tokens)
        print(json.dumps({"scored": at.tokens_scored, "needed": needed, "grown": status("VmPeak") - before}))
"""


def outcome(tokens: int, share: float) -> dict[str, object]:
    command = [sys.executable, "-c", SCRIPT, str(tokens), str(share)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900)
    assert run.returncode == 0, run.stderr
    answer: dict[str, object] = json.loads(run.stdout.splitlines()[-1])
    return answer


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc, which this system does not have")
def test_64k_tokens_stay_inside_the_ceiling() -> None:
    answer = outcome(TOKENS, 1.0)
    assert answer.get("scored") == TOKENS - 1, answer
    grown, needed = answer["grown"], answer["needed"]
    assert isinstance(grown, int)
    assert isinstance(needed, int)
    assert grown <= needed < 5 * grown, "a ceiling that everything fits under would say nothing"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc, which this system does not have")
def test_the_ceiling_is_real() -> None:
    assert "failed" in outcome(32_768, 0.05)
