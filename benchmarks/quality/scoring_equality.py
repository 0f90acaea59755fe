"""Perplexity as the API computes it against a plain transformers loop, on both trained models.

The plain loop has no cache and no chunks, and rotates by transformers' own ``rope_parameters``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from benchmarks.models import ENCODINGS, folder_of, native
from benchmarks.paths import SHARED
from benchmarks.timing import Report, finish
from patches import Method, parse
from service.evaluation.documents import language_reference
from service.evaluation.perplexity.plan import plan_of
from service.evaluation.perplexity.request import PerplexityRequest
from service.evaluation.unit import evaluate
from service.models.registry import ModelRegistry
from service.settings import Settings

NATIVE = ENCODINGS[:4]
MULTIPLES = (1, 2, 4)
CHARACTERS = 40_000


def run(quick: bool = False) -> Report:
    """Every method and length; the table holds perplexities and their relative difference."""
    report = Report(
        "scoring_equality",
        "/perplexity against a plain transformers loop (goal: within 1e-4 relative)",
        ("model", "method", "length", "plain loop", "ropeway", "relative difference"),
    )
    differences = []
    for name in ("stories260K", "llama3-1m-atto"):
        with folder_of(name) as (folder, note):
            if note:
                report.notes.append(note)
            models = ModelRegistry(Settings(model=str(folder), dtype="float32", device="cpu", _env_file=None))
            try:
                differences += compare(models, MULTIPLES[:1] if quick else MULTIPLES, report)
            finally:
                models.close()
    report.notes.append(f"largest relative difference {max(differences):.1e}")
    return report


def compare(models: ModelRegistry, multiples: tuple[int, ...], report: Report) -> list[float]:
    """Relative differences of perplexity, every method at every multiple of the trained length."""
    served = models.default
    lengths = [served.trained_length * multiple for multiple in multiples]
    methods: list[Method] = [parse(encoding) for encoding in NATIVE]
    request = PerplexityRequest(input=text(), methods=methods, lengths=lengths)
    plan = plan_of(request, models, Settings(_env_file=None))
    result = finish(evaluate(plan))
    token_ids = plan.documents[0].token_ids
    if plan.bos is not None:
        token_ids = [plan.bos, *token_ids]
    differences = []
    for encoding, measured in zip(NATIVE, result.methods, strict=True):
        for length, ours in zip(lengths, measured.lengths, strict=True):
            expected = plain_perplexity(served.patch.model, encoding, token_ids[:length])
            differences.append(abs(ours.perplexity - expected) / expected)
            cells = (f"{expected:.6f}", f"{ours.perplexity:.6f}", f"{differences[-1]:.1e}")
            report.add(served.name, measured.label, length, *cells)
    return differences


def plain_perplexity(model: PreTrainedModel, encoding: dict[str, Any], token_ids: list[int]) -> float:
    """One unpatched forward over all tokens; exp of the mean cross-entropy."""
    twin = native(model, encoding)
    assert twin is not None
    ids = torch.tensor([token_ids])
    with torch.no_grad():
        logits = twin(input_ids=ids, use_cache=False).logits[0, :-1]
    return math.exp(F.cross_entropy(logits.double(), ids[0, 1:]).item())


def text(characters: int = CHARACTERS) -> str:
    """Children's stories, which both models were trained on, or the language reference in the interpreter."""
    stories = SHARED / "corpora" / "tinystories.txt"
    whole = stories.read_text(encoding="utf-8") if stories.is_file() else language_reference()
    return whole[:characters]
