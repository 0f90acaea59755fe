"""A long document on the CPU, inside a ceiling that is computed beforehand and that the kernel holds."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from patches import parse, patched
from service.evaluation.documents import from_token_ids
from service.evaluation.perplexity.plan import PerplexityPlan
from service.evaluation.scoring.pass_memory import pass_bytes
from service.evaluation.unit import Subject, evaluate
from tests.forks.process import forked
from tests.service.evaluation.prompting import finish

TOKENS = 32_768
CHUNK = 2048


class Bytes:
    """A tokenizer of one character per token."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return "x" * len(ids)


def status(name: str) -> int:
    """Bytes of a line of ``/proc/self/status``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kib,) = (int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
    return kib << 10


def measured(patch: Any, length: int) -> Any:
    plan = PerplexityPlan(
        model="m",
        trained_length=256,
        subjects=[Subject(parse({"method": "default"}), patch, "m")],
        documents=[from_token_ids("d", torch.randint(0, 64, (length,)).tolist(), Bytes())],
        skipped=[],
        lengths=[256, length],
        protocol="curve",
        stride=0,
        tail=0,
        bos=None,
        chunk=CHUNK,
    )
    return finish(evaluate(plan))


def measure(share: float, answer: Path) -> None:
    """Score ``TOKENS`` tokens with ``share`` of the memory that they should need; the limit stays on the process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = LlamaConfig(vocab_size=64, max_position_embeddings=256, head_dim=16, **shape)
    with patched(LlamaForCausalLM(config).eval()) as patch:
        measured(patch, 512)
        needed = pass_bytes(patch, TOKENS, CHUNK)
        before = status("VmSize")
        resource.setrlimit(resource.RLIMIT_AS, (before + int(needed * share),) * 2)
        try:
            result = measured(patch, TOKENS)
        except (RuntimeError, MemoryError) as error:
            found = {"failed": str(error)[:200], "needed": needed}
        else:
            (at,) = (at for at in result.methods[0].lengths if at.length == TOKENS)
            found = {"scored": at.tokens_scored, "needed": needed, "grown": status("VmPeak") - before}
    answer.write_text(json.dumps(found))


def outcome(share: float, folder: Path) -> dict[str, Any]:
    process = forked(measure, share, folder / "answer", log=folder / "log")
    assert process.wait(280) == 0, (folder / "log").read_text()
    found: dict[str, Any] = json.loads((folder / "answer").read_text())
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc, which this system does not have")
def test_a_long_pass_stays_inside_the_ceiling(tmp_path: Path) -> None:
    answer = outcome(1.0, tmp_path)
    assert answer.get("scored") == TOKENS - 1, answer
    assert answer["grown"] <= answer["needed"] < 5 * answer["grown"], "a ceiling that everything fits under"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc, which this system does not have")
def test_the_ceiling_is_real(tmp_path: Path) -> None:
    assert "failed" in outcome(0.05, tmp_path)
