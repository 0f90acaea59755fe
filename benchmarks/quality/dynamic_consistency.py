"""Dynamic NTK with one base per request, against a base that grows while cached keys keep their old one.

Servers that rotate keys when they are written keep each under the base of the moment (huggingface/transformers issue
25104). This module measures its cost on real models: perplexity of the last tokens of windows of each length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from benchmarks.paths import SHARED
from benchmarks.quality.scoring_equality import text
from benchmarks.timing import Report, finish
from patches import Method, Patched, parse
from service.evaluation.perplexity.plan import plan_of
from service.evaluation.perplexity.request import PerplexityRequest
from service.evaluation.perplexity.results import MethodResult, PerplexityResult
from service.evaluation.unit import evaluate
from service.figures.evaluations.perplexity import perplexity_picture
from service.models.registry import ModelRegistry
from service.settings import Settings

MODELS = ("stories260K", "llama3-1m-atto")
MULTIPLES = (1, 1.25, 1.5, 2, 3, 4, 6, 8)
TAIL = 128
DYNAMIC = {"method": "dynamic"}
STATIC = {"method": "ntk", "factor": 4.0}
PLAIN = {"method": "default"}

CONSISTENT = "dynamic, one base per request"
GROWING = "dynamic, base grows, keys stay as written"
FIXED = "ntk(factor=4), one base for all lengths"
LABELS = {"consistent": CONSISTENT, "growing": GROWING, "static": FIXED, "plain": "default"}


def run(quick: bool = False) -> Report:
    """A table of every trained model that is at hand, and a picture each."""
    report = Report(
        "dynamic_consistency",
        f"perplexity of the last {TAIL} tokens of windows of each length (goal: dynamic NTK without cached keys of "
        "other bases)",
        ("model", "length", "x trained", *LABELS.values()),
    )
    report.numbers = {"models": []}
    for name in MODELS:
        folder = SHARED / "models" / name
        if not (folder / "config.json").is_file():
            report.notes.append(f"{name} is absent (looked in {folder.parent.name}): not measured")
            continue
        models = ModelRegistry(Settings(model=str(folder), dtype="float32", device="cpu", _env_file=None))
        try:
            add(report, measure(models, MULTIPLES[:4:3] if quick else MULTIPLES, 20_000 if quick else 40_000))
        finally:
            models.close()
    return report


def add(report: Report, result: PerplexityResult) -> None:
    """The rows, the numbers and the picture of one model."""
    assert report.numbers is not None
    curves = {method.label: [at.perplexity for at in method.lengths] for method in result.methods}
    for index, length in enumerate(result.lengths):
        cells = [curves[label][index] for label in LABELS.values()]
        report.add(result.model, length, f"{length / result.trained_length:g}", *cells)
    by_key = {key: curves[label] for key, label in LABELS.items()}
    windows = [at.windows for at in result.methods[0].lengths]
    report.numbers["models"].append(
        {"model": result.model, "trained_length": result.trained_length, "lengths": result.lengths, **by_key}
    )
    report.notes.append(f"{result.model}: {min(windows)} windows at every length, the same scored tokens")
    report.pictures[f"{report.name}-{result.model}"] = perplexity_picture(result).png()


def measure(models: ModelRegistry, multiples: tuple[float, ...], characters: int) -> PerplexityResult:
    """All four on the same windows of one model, through the service's own evaluation."""
    served = models.default
    lengths = [int(served.trained_length * multiple) for multiple in multiples]
    request = PerplexityRequest(
        input=text(characters),
        methods=[DYNAMIC, STATIC, PLAIN],
        lengths=lengths,
        protocol="tail",
        tail=TAIL,
        stride=4 * TAIL,
    )
    settings = Settings(_env_file=None)
    plan = plan_of(request, models, settings)
    result: PerplexityResult = finish(evaluate(plan))
    with growing_base(served.patch, parse(DYNAMIC)):
        grown: PerplexityResult = finish(evaluate(replace(plan, subjects=plan.subjects[-1:])))
    consistent, static, plain = result.methods
    named = zip(LABELS.values(), (consistent, grown.methods[0], static, plain), strict=True)
    methods: list[MethodResult] = [method.model_copy(update={"label": label}) for label, method in named]
    return result.model_copy(update={"methods": methods})


@contextmanager
def growing_base(patch: Patched, method: Method) -> Iterator[None]:
    """Within it, "default" is ``method`` as of a server that decodes token by token with a cache of rotated keys.

    Both the query and the key of position p turn by the frequencies of p + 1 tokens. The request had that many when
    position p was fed. One pass, or chunks, then compute what token-by-token decoding does, as no token sees later
    ones.
    """
    module = patch.rotary_tables.chosen[0].module
    frequencies = by_position(patch, method)

    def forward(x: torch.Tensor, position_ids: torch.Tensor, *_: Any) -> Any:
        return patch.table_format.table(position_ids[..., None], frequencies(position_ids), 1.0, x.dtype)

    served = module.forward
    module.forward = forward
    try:
        yield
    finally:
        module.forward = served


def by_position(patch: Patched, method: Method) -> Callable[[torch.Tensor], torch.Tensor]:
    """Positions [rows, tokens] to the frequencies [rows, tokens, pairs] of a request that ends there."""
    known: dict[int, torch.Tensor] = {}

    def of(position: int) -> torch.Tensor:
        if position not in known:
            known[position] = torch.tensor(patch.resolve(method, position + 1).inv_freq)
        return known[position]

    def frequencies(positions: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.stack([of(int(position)) for position in row]) for row in positions])

    return frequencies
