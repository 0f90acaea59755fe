"""Sixteen lengths by one pass of the ``curve`` protocol, against the same function one length at a time."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.models import llama, random_model
from benchmarks.timing import Report, finish, interleaved
from patches import parse, patched
from service.evaluation.documents import from_token_ids
from service.evaluation.perplexity.plan import PerplexityPlan
from service.evaluation.unit import Subject, evaluate

METHODS = ({"method": "default"}, {"method": "yarn", "factor": 8.0}, {"method": "dynamic", "factor": 8.0})


class _Bytes:
    """Replaces a tokenizer: random tokens are one byte each."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return "x" * len(token_ids)


def run(quick: bool = False) -> Report:
    """The 5M-parameter random model; a fixed schedule takes one pass, dynamic one pass per length."""
    torch.set_num_threads(2)
    report = Report(
        "curve_speed",
        "16 lengths, 256 to 4096 tokens, by one curve against one call per length (goal 6 where one pass serves)",
        ("method", "curve", "per length", "x faster", "middle half", "largest relative difference of NLL"),
    )
    lengths = [128, 256, 384] if quick else list(range(256, 4097, 256))
    tokens = torch.randint(3, 2048, (lengths[-1],), generator=torch.Generator().manual_seed(2)).tolist()
    with patched(random_model(llama())) as patch:
        plan = PerplexityPlan(
            model="random",
            trained_length=256,
            subjects=[],
            documents=[from_token_ids("random", tokens, _Bytes())],
            skipped=[],
            lengths=lengths,
            protocol="curve",
            stride=0,
            tail=0,
            bos=None,
            chunk=512,
        )
        for fields in METHODS[:1] if quick else METHODS:
            subject = Subject(parse(fields), patch, "random")
            measure(replace(plan, subjects=[subject]), 2 if quick else 3, report)
    return report


def measure(plan: PerplexityPlan, rounds: int, report: Report) -> None:
    def one_curve() -> list[float]:
        return [length.nll_mean for length in finish(evaluate(plan)).methods[0].lengths]

    def per_length() -> list[float]:
        alone = (finish(evaluate(replace(plan, lengths=[n]))) for n in plan.lengths)
        return [result.methods[0].lengths[0].nll_mean for result in alone]

    difference = max(abs(a - b) / b for a, b in zip(one_curve(), per_length(), strict=True))
    timings = interleaved({"curve": one_curve, "per length": per_length}, rounds, warmup=0)
    report.add(
        plan.subjects[0].method.method,
        f"{timings.median('curve'):.2f} s",
        f"{timings.median('per length'):.2f} s",
        timings.ratio("per length", "curve"),
        timings.spread("per length", "curve"),
        f"{difference:.1e}",
    )
