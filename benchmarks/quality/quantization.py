"""Perplexity by length and method with linear layers in 8 and 4 bits against float32; then memory and speed.

The service's own evaluation in process on the held-out books, as in ``method_table``. Memory and speed are those of a
random Llama. Its linear layers have most of its weights, as in models of practical size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.models import llama, random_model
from benchmarks.quality.method_table import BOOKS, MODELS, stretches
from benchmarks.speed.patched_overhead import decoder, prefill
from benchmarks.timing import Report, finish, interleaved
from service.evaluation.formatting import short_number
from service.evaluation.perplexity.plan import plan_of
from service.evaluation.perplexity.request import PerplexityRequest
from service.evaluation.perplexity.results import PerplexityResult
from service.evaluation.unit import evaluate
from service.models.checkpoint.quantization import Scheme, quantize
from service.models.linear.layers import use_fastest
from service.models.memory.weights import places
from service.models.registry import ModelRegistry
from service.settings import Settings

FULL = "float32"
SCHEMES: tuple[Scheme, ...] = ("int8", "int4")
MULTIPLES = (1, 4, 8)
SERVED = "float32, as served"
"""By the products that the server chooses; the first row multiplies as torch does."""
DOCUMENTS = 1
METHODS: list[dict[str, Any]] = [
    {"method": "default"},
    {"method": "yarn", "factor": 8},
    {"method": "self_extend", "group_size": 16, "neighbor_window": 64},
    {"method": "lm_infinite"},
]
"""Plain rotation, interpolation, bands, a window; parameters for 8 times the trained length."""
OWN = [{"method": "default"}]
"""Methods of the model trained with ALiBi."""
WIDE = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 2}
PROMPTS, BATCHES, ROUNDS = (64, 512), (1, 4, 16), 15
"""Tokens of a prompt; sequences that decode together, behind the shorter one."""


def run(quick: bool = False) -> Report:
    """Rows of one model, method and number format; notes with memory and speed."""
    torch.set_num_threads(2)
    multiples = MULTIPLES[:2] if quick else MULTIPLES
    report = Report(
        "quantization",
        "perplexity by method and length in units of the trained one, and its change against float32",
        ("model", "method", "weights", *(f"{multiple}x" for multiple in multiples)),
    )
    report.numbers = {"multiples": list(multiples), "models": []}
    for name, folder in MODELS.items():
        if not (folder / name / "config.json").is_file() or not BOOKS.is_dir():
            report.notes.append(f"{name} is not measured: the model or the books are absent")
            continue
        measured = {scheme: measure(name, scheme, multiples) for scheme in (FULL, *SCHEMES)}
        add(report, name, measured)
    torch.set_num_threads(1)  # other processes disturb it least
    report.numbers["cost"] = cost(3 if quick else ROUNDS)
    torch.set_num_threads(2)
    report.notes += [cost_line(entry) for entry in report.numbers["cost"]]
    return report


def measure(name: str, scheme: str, multiples: tuple[int, ...]) -> dict[str, Any]:
    """Perplexity by method and length of one model in one number format, its layers by format and its bytes."""
    settings = Settings(
        model=str(MODELS[name] / name),
        dtype=FULL,
        device="cpu",
        quantization=None if scheme == FULL else scheme,
        _env_file=None,
    )
    models = ModelRegistry(settings)
    try:
        served = models.default
        lengths = [served.trained_length * multiple for multiple in multiples]
        books = [ids for _, (_, ids) in zip(range(DOCUMENTS), stretches(served, lengths[-1]), strict=False)]
        methods = METHODS if served.patch.geometry.rotates else OWN
        request = PerplexityRequest(input=books, methods=methods, lengths=lengths, protocol="disjoint")
        result: PerplexityResult = finish(evaluate(plan_of(request, models, Settings(_env_file=None))))
        layers = {} if served.quantization is None else served.quantization.layers
        perplexity = {method.label: [at.perplexity for at in method.lengths] for method in result.methods}
        return {"layers": layers, "bytes": served.memory.weights, "perplexity": perplexity}
    finally:
        models.close()


def add(report: Report, name: str, measured: Mapping[str, dict[str, Any]]) -> None:
    """The rows and the numbers of one model."""
    assert report.numbers is not None
    report.numbers["models"].append({"model": name, "formats": dict(measured)})
    for row in rows(name, measured):
        report.add(*row)
    parts = [
        f"{scheme}: {layers_text(measured[scheme]['layers'])}, "
        f"{measured[scheme]['bytes'] / measured[FULL]['bytes']:.2f} of the bytes"
        for scheme in SCHEMES
    ]
    report.notes.append(f"{name}: {'; '.join(parts)}")


def rows(name: str, measured: Mapping[str, dict[str, Any]]) -> list[list[str]]:
    """One row per method and number format; changes in percent behind the perplexities of the quantized ones."""
    found = []
    for label, full in measured[FULL]["perplexity"].items():
        found.append([name, label, FULL, *map(short_number, full)])
        for scheme in SCHEMES:
            pairs = zip(measured[scheme]["perplexity"][label], full, strict=True)
            found.append([name, label, scheme, *(f"{short_number(a)} ({100 * (a / b - 1):+.1f} %)" for a, b in pairs)])
    return found


def layers_text(layers: Mapping[str, int]) -> str:
    return " and ".join(f"{count} layers in {name}" for name, count in sorted(layers.items()))


def cost(rounds: int) -> list[dict[str, Any]]:
    """Bytes and seconds of the random Llama in every number format, as ratios to float32, from interleaved runs."""
    config = llama(**WIDE, num_hidden_layers=4, max_position_embeddings=2 * PROMPTS[-1])
    models = {scheme: random_model(config) for scheme in (FULL, SERVED, *SCHEMES)}
    for scheme in SCHEMES:
        quantize(models[scheme], scheme, torch.device("cpu"))
    for scheme in (SERVED, *SCHEMES):
        use_fastest(models[scheme])
    timed = {label: interleaved(runs, rounds) for label, runs in timed_runs(models).items()}
    parameters = sum(parameter.numel() for parameter in models[FULL].parameters())
    return [
        {
            "scheme": scheme,
            "parameters": parameters,
            "bytes": sum(places(model).values()),
            "seconds": {label: timings.ratio(scheme, FULL) for label, timings in timed.items()},
        }
        for scheme, model in models.items()
    ]


def timed_runs(models: Mapping[str, PreTrainedModel]) -> dict[str, dict[str, Callable[[], object]]]:
    """Runs of each model, by the name of the figure."""
    tokens = torch.randint(3, 2048, (1, PROMPTS[-1]), generator=torch.Generator().manual_seed(0))
    runs: dict[str, dict[str, Callable[[], object]]] = {}
    for length in PROMPTS:
        prompt = tokens[:, :length]
        runs[f"prefill {length}"] = {name: partial(prefill, model, prompt) for name, model in models.items()}
    for batch in BATCHES:
        prompt = tokens[:, : PROMPTS[0]].expand(batch, -1)
        runs[f"decode {batch}"] = {name: decoder(model, prompt) for name, model in models.items()}
    return runs


def cost_line(entry: Mapping[str, Any]) -> str:
    ratios = ", ".join(f"{name} {value:.2f}" for name, value in entry["seconds"].items())
    size = f"{entry['parameters'] / 1e6:.0f}M weights in {entry['scheme']}: {entry['bytes'] / 1e6:.0f} MB"
    return f"random Llama of {size}. Time over float32: {ratios}"
