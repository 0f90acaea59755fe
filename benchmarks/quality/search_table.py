"""`search` on trained models: its factors against the encodings that it begins with, on text that it never read."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from benchmarks.quality.method_table import BOOKS, MODELS
from benchmarks.timing import Report, finish
from service.evaluation.formatting import short_number
from service.evaluation.search.plan import plan_of
from service.evaluation.search.request import SearchRequest
from service.evaluation.search.results import SearchMethod, SearchResult
from service.evaluation.unit import evaluate
from service.models.registry import ModelRegistry
from service.settings import Settings

READ = ("great-expectations-1400", "middlemarch-145", "moby-dick-or-the-whale-2701")
"""Books that no model here was trained on."""
WINDOWS = {"windows": 3, "held_out": 12}
OTHERS = ("yarn", "ntk", "linear", "default")
"""Encodings beside the search, as it has them by default."""


class Budget(NamedTuple):
    """Candidates of the first generation, and generations."""

    population: int
    generations: int


SMALL, DEFAULT, LARGE = Budget(16, 6), Budget(24, 8), Budget(40, 16)
SEARCHES = [
    *[(model, times, SMALL) for model in ("ropeway-demo", "stories260K", "llama3-1m-atto") for times in (4, 8)],
    *[("ropeway-demo", 8, budget) for budget in (DEFAULT, LARGE)],
]
"""Model, length in units of the trained one, and budget."""


def run(quick: bool = False) -> Report:
    """Every search on its own; those of one model and length read the same windows."""
    torch.set_num_threads(1)
    report = Report(
        "search_table",
        f"`search` on {WINDOWS['windows']} windows, perplexity of the last half of {WINDOWS['held_out']} later ones. "
        "Goal: surely below every encoding that it begins with",
        ("model", "times", "budget", "candidates", "search", *OTHERS, "cos and sin", "yarn / search", "surely beats"),
    )
    report.numbers = {"searches": []}
    for name, times, budget in SEARCHES[:1] if quick else SEARCHES:
        folder = MODELS[name] / name
        if not (folder / "config.json").is_file() or not BOOKS.is_dir():
            report.notes.append(f"{name} is not measured: the model or the books are absent")
            continue
        models = ModelRegistry(Settings(model=str(folder), dtype="float32", device="cpu", _env_file=None))
        try:
            add(report, times, Budget(4, 2) if quick else budget, models)
        finally:
            models.close()
    report.notes.append(f"books: {', '.join(READ)}; seed 0")
    report.notes.append("cos and sin: the factor on them that was found; ratios have 95 % intervals over windows")
    return report


def add(report: Report, times: int, budget: Budget, models: ModelRegistry) -> None:
    """The row and the numbers of one search."""
    assert report.numbers is not None
    fields = {"length": times * models.default.trained_length, **budget._asdict(), **WINDOWS}
    books = [(BOOKS / f"{name}.txt").read_text(encoding="utf-8") for name in READ]
    plan = plan_of(SearchRequest(input=books, **fields), models, Settings(_env_file=None))
    result: SearchResult = finish(evaluate(plan))
    entry = numbers_of(result) | {"times": times, **budget._asdict()}
    report.numbers["searches"].append(entry)
    report.add(
        result.model,
        times,
        f"{budget.population} x {budget.generations}",
        entry["candidates"],
        *map(short_number, perplexities(entry)),
        f"{entry['attention_factor']:.3f}",
        ratio(entry["others"]["yarn"]),
        ", ".join(entry["surely_beats"]),
    )


def numbers_of(result: SearchResult) -> dict[str, Any]:
    """The numbers of one search: what was found, and the other encodings on the held-out windows by method."""
    found, *others = result.methods
    assert found.held_out is not None
    return {
        "model": result.model,
        "length": result.target_length,
        "candidates": sum(generation.candidates for generation in result.generations),
        "best": [generation.best for generation in result.generations],
        "perplexity": found.held_out.perplexity,
        "attention_factor": result.pe["attention_factor"],
        "factors": found.factors,
        "surely_beats": result.answer.surely_beats,
        "others": {method.request["method"]: _compared(method) for method in others},
    }


def _compared(method: SearchMethod) -> dict[str, Any]:
    at = method.held_out
    assert at is not None
    assert at.times_search_interval is not None
    ends = at.times_search_interval
    return {"perplexity": at.perplexity, "times_search": at.times_search, "interval": [ends.low, ends.high]}


def perplexities(entry: dict[str, Any]) -> list[float]:
    """Of the search, then of ``OTHERS``."""
    return [entry["perplexity"], *(entry["others"][name]["perplexity"] for name in OTHERS)]


def ratio(at: dict[str, Any]) -> str:
    """The ratio of a perplexity to that of the search, with its interval."""
    low, high = at["interval"]
    return f"{at['times_search']:.3f} ({low:.3f} to {high:.3f})"
