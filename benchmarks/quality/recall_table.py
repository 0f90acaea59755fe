"""Recall beside perplexity: passkeys found and perplexity, by method and length, on both demo models.

Both are evaluations of the service, in process. A passkey of five digits lies at five depths of the published filler.
Perplexity is that of consecutive whole windows of the held-out books.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.quality.method_table import BOOKS, DOCUMENTS, stretches
from benchmarks.timing import Report, finish
from service.evaluation.formatting import percent, short_number
from service.evaluation.perplexity.plan import plan_of as perplexity_plan
from service.evaluation.perplexity.request import PerplexityRequest
from service.evaluation.perplexity.results import PerplexityResult
from service.evaluation.retrieval.plan import plan_of as passkey_plan
from service.evaluation.retrieval.request import PasskeyRequest
from service.evaluation.retrieval.results import PasskeyResult
from service.evaluation.unit import evaluate
from service.figures.evaluations.retrieval import score_picture
from service.models.checkpoint.loading import DEMO
from service.models.registry import ModelRegistry
from service.settings import Settings

MULTIPLES = (1, 2, 4, 8)
METHODS: dict[str, list[dict[str, Any]]] = {
    "ropeway-demo": [
        {"method": "default"},
        {"method": "linear", "factor": 4},
        {"method": "ntk", "factor": 8},
        {"method": "yarn", "factor": 4},
        {"method": "yarn", "factor": 8},
        {"method": "dynamic_yarn"},
        {"method": "self_extend", "group_size": 8, "neighbor_window": 64},
        {"method": "rerope"},
        {"method": "dual_chunk"},
        {"method": "lm_infinite"},
        {"method": "streaming"},
    ],
    "ropeway-demo-alibi": [
        {"method": "default"},
        {"method": "alibi", "slope_factor": "dynamic"},
    ],
}
"""Model -> requests: plain rotation, interpolation, bands, windows; for ALiBi its own slopes and flatter ones."""
SAMPLES = 6
"""Keys per length and depth: 30 at every length."""


def run(quick: bool = False) -> Report:
    """One row per model and method."""
    torch.set_num_threads(2)
    multiples, samples = (MULTIPLES[:2], 1) if quick else (MULTIPLES, SAMPLES)
    report = Report(
        "recall_table",
        "passkeys found, with 95 % interval, and perplexity below, by length in units of the trained one",
        ("model", "method", *(f"{multiple}x" for multiple in multiples)),
    )
    report.numbers = {"multiples": list(multiples), "models": []}
    if not BOOKS.is_dir():
        report.notes.append("nothing is measured: the books are absent")
        return report
    for name, methods in METHODS.items():
        models = ModelRegistry(Settings(model=str(DEMO / name), dtype="float32", device="cpu", _env_file=None))
        try:
            add(report, *measure(models, methods, multiples, samples))
        finally:
            models.close()
    report.notes.append(
        f"passkey: {5 * samples} prompts of five digits at every length, depths 0 to 1. Perplexity: disjoint windows "
        f"of {DOCUMENTS} books that no model was trained on"
    )
    return report


def measure(
    models: ModelRegistry, methods: list[dict[str, Any]], multiples: tuple[int, ...], samples: int
) -> tuple[PasskeyResult, PerplexityResult]:
    served, settings = models.default, Settings(_env_file=None)
    lengths = [served.trained_length * multiple for multiple in multiples]
    asked = PasskeyRequest(methods=methods, lengths=lengths, samples=samples)
    found: PasskeyResult = finish(evaluate(passkey_plan(asked, models, settings)))
    books = [ids for _, (_, ids) in zip(range(DOCUMENTS), stretches(served, lengths[-1]), strict=False)]
    scored = PerplexityRequest(input=books, methods=methods, lengths=lengths, protocol="disjoint")
    perplexity: PerplexityResult = finish(evaluate(perplexity_plan(scored, models, settings)))
    return found, perplexity


def add(report: Report, found: PasskeyResult, perplexity: PerplexityResult) -> None:
    """The rows, the numbers and the picture of one model."""
    assert report.numbers is not None
    methods = []
    for recall, scored in zip(found.methods, perplexity.methods, strict=True):
        entry = {
            "label": recall.label,
            "recall": [at.score for at in recall.lengths],
            "interval": [(at.interval.low, at.interval.high) for at in recall.lengths],
            "perplexity": [at.perplexity for at in scored.lengths],
        }
        methods.append(entry)
        report.add(found.model, recall.label, *map(cell, entry["recall"], entry["interval"], entry["perplexity"]))
    report.numbers["models"].append({"model": found.model, "lengths": found.lengths, "methods": methods})
    report.pictures[f"{report.name}-{found.model}"] = score_picture(found).png()


def cell(recall: float, interval: tuple[float, float], perplexity: float) -> str:
    """Recall with its interval, and perplexity."""
    low, high = (percent(bound) for bound in interval)
    return f"{percent(recall)} ({low} to {high}); {short_number(perplexity)}"
