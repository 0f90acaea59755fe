"""Perplexity of every method that applies, at 1 to 16 times the trained length, on four trained models.

The service's own evaluation in process, over consecutive whole windows of each length. All lengths therefore score
the same text. The requests are those of ``benchmarks/typical.py``, by rule from the model's shape and trained length.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from benchmarks.paths import SHARED
from benchmarks.quality.demo_table import documents_in
from benchmarks.timing import Report, finish
from benchmarks.typical import REACH, Fields, typical
from patches import Patched, parse
from service.evaluation.formatting import short_number
from service.evaluation.perplexity.plan import plan_of
from service.evaluation.perplexity.request import PerplexityRequest
from service.evaluation.perplexity.results import MethodResult, PerplexityResult
from service.evaluation.unit import evaluate
from service.figures.evaluations.perplexity import perplexity_picture
from service.models.checkpoint.loading import DEMO
from service.models.registry import ModelRegistry, ServedModel
from service.settings import Settings

BOOKS = SHARED / "corpora" / "heldout"
"""Read by none of the models in training. Two of them learned from children's stories, of which no held-out part is at
hand. Books are far from what they know, and their perplexities are high throughout."""
MODELS = {
    "stories260K": SHARED / "models",
    "llama3-1m-atto": SHARED / "models",
    "ropeway-demo": DEMO,
    "ropeway-demo-alibi": DEMO,
}
"""Model -> the folder it lies in."""
MULTIPLES = (1, 2, 4, 8, REACH)
DOCUMENTS = 3
"""Each as long as the longest window: one such window per document, and more of every shorter one."""
MORE: list[Fields] = [
    {"method": "rerope", "attention_temperature": "log_n"},
    {"method": "dual_chunk", "formulation": "paper"},
    {"method": "alibi", "slope_factor": "dynamic"},
]
"""Second settings of methods that are published in two."""
DRAWN = (
    *("default", "linear", "dynamic", "ntk", "yarn", "self_extend", "rerope", "dual_chunk", "lm_infinite"),
    *("streaming", "none", "alibi"),
)
"""Methods of the pictures: one of each kind, the first setting of each."""


def run(quick: bool = False) -> Report:
    """One block of rows and one picture per model that is at hand."""
    torch.set_num_threads(2)
    multiples, documents = (MULTIPLES[:2], 1) if quick else (MULTIPLES, DOCUMENTS)
    report = Report(
        "method_table",
        "perplexity by method and length in units of the trained one, disjoint windows. "
        f"The parameters are for {REACH} times the trained length. No goal: which methods hold is the question",
        ("model", "method", *(f"{multiple}x" for multiple in multiples)),
    )
    report.numbers = {"multiples": list(multiples), "models": []}
    for name, folder in MODELS.items():
        if not (folder / name / "config.json").is_file() or not BOOKS.is_dir():
            report.notes.append(f"{name} is not measured: the model or the books are absent")
            continue
        models = ModelRegistry(Settings(model=str(folder / name), dtype="float32", device="cpu", _env_file=None))
        try:
            add(report, *measure(models, multiples, documents))
        finally:
            models.close()
    return report


def measure(
    models: ModelRegistry, multiples: tuple[int, ...], documents: int
) -> tuple[PerplexityResult, list[Fields], dict[str, str]]:
    """The result, the requests that it answers in order, and why others did not apply, by method."""
    served = models.default
    lengths = [served.trained_length * multiple for multiple in multiples]
    taken, refused = applicable(served.patch, lengths)
    chosen = dict(islice(stretches(served, lengths[-1]), documents))
    request = PerplexityRequest(
        input=list(chosen.values()),
        methods=taken,
        lengths=lengths,
        protocol="disjoint",
    )
    plan = plan_of(request, models, Settings(_env_file=None))
    result: PerplexityResult = finish(evaluate(plan))
    for document, name in zip(result.documents, chosen, strict=True):
        document.name = name
    return result, taken, refused


def applicable(patch: Patched, lengths: list[int]) -> tuple[list[Fields], dict[str, str]]:
    """Requests that the model takes at every length, each encoding once, and the reasons against the others.

    Methods that need weights learned for them are left out: with random values they would measure nothing.
    """
    taken: list[Fields] = []
    refused: dict[str, str] = {}
    seen = set()
    requests = typical(patch.geometry)
    requests["t5_bias"].pop("relative_attention_bias")
    for fields in [*requests.values(), *MORE]:
        method = parse(fields)
        try:
            resolved = tuple(patch.resolve(method, length) for length in lengths)
        except ValueError as error:
            refused[method.method] = str(error)
            continue
        if resolved not in seen:
            seen.add(resolved)
            taken.append(fields)
    return taken, refused


def stretches(served: ServedModel, tokens: int) -> Iterator[tuple[str, list[int]]]:
    """Name and first ``tokens`` token ids of every book."""
    for name, text in documents_in(BOOKS, 10 * tokens).items():
        yield name, served.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:tokens]


def add(report: Report, result: PerplexityResult, requests: list[Fields], refused: dict[str, str]) -> None:
    """The rows, the numbers and the picture of one model."""
    assert report.numbers is not None
    methods: list[dict[str, Any]] = []
    for fields, method in zip(requests, result.methods, strict=True):
        perplexity = [at.perplexity for at in method.lengths]
        report.add(result.model, method.label, *map(short_number, perplexity))
        intervals = [(at.interval.low, at.interval.high) if at.interval else None for at in method.lengths]
        methods.append(
            {
                "method": fields["method"],
                "label": method.label,
                "request": fields,
                "perplexity": perplexity,
                "interval": intervals,
            }
        )
    tokens = sum(document.tokens for document in result.documents)
    books = ", ".join(document.name for document in result.documents)
    report.numbers["models"].append(
        {
            "model": result.model,
            "trained_length": result.trained_length,
            "lengths": result.lengths,
            "tokens": tokens,
            "methods": methods,
            "refused": refused,
        }
    )
    report.notes.append(
        f"{result.model}: trained at {result.trained_length} tokens, {books}, {tokens:,} tokens at every length; "
        f"{len(refused)} methods do not apply ({report.name}.json has the reasons)"
    )
    report.pictures[f"{report.name}-{result.model}"] = perplexity_picture(
        result.model_copy(update={"methods": drawn(requests, result.methods)})
    ).png()


def drawn(requests: list[Fields], methods: list[MethodResult]) -> list[MethodResult]:
    """The first of each method in ``DRAWN``."""
    first: dict[str, MethodResult] = {}
    for fields, method in zip(requests, methods, strict=True):
        first.setdefault(str(fields["method"]), method)
    return [first[name] for name in DRAWN if name in first]
