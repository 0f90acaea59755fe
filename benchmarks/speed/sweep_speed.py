"""A sweep of 8 methods, 16 lengths and 3 documents in one process, against one script run per method and length."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import folder_of
from benchmarks.paths import ROOT, SHARED
from benchmarks.timing import Report, finish
from service.evaluation.documents import language_reference
from service.evaluation.sweep.plan import plan_of
from service.evaluation.sweep.request import SweepRequest
from service.evaluation.sweep.results import SweepResult
from service.evaluation.unit import evaluate
from service.models.registry import ModelRegistry
from service.settings import Settings

METHODS: list[dict[str, Any]] = [
    {"method": "default"},
    *({"method": "linear", "factor": factor} for factor in (2.0, 8.0)),
    {"method": "dynamic", "factor": 4.0},
    *({"method": "yarn", "factor": factor} for factor in (2.0, 4.0, 8.0)),
    {"method": "llama3", "factor": 8.0},
]
LENGTHS = list(range(256, 4097, 256))


def run(quick: bool = False) -> Report:
    """Half of the lengths' scripts are sampled: each method at four lengths, spread so that all lengths occur."""
    torch.set_num_threads(2)
    report = Report(
        "sweep_speed",
        "a sweep of 8 methods x 16 lengths x 3 documents in one process against one script run per method and length "
        "(goal: 10 times faster, the same numbers)",
        ("what", "value", "remark"),
    )
    methods, lengths = (METHODS[:2], [64, 128]) if quick else (METHODS, LENGTHS)
    with tempfile.TemporaryDirectory() as temporary, folder_of("stories260K") as (folder, note):
        if note:
            report.notes.append(note)
        files = documents(Path(temporary), lengths[-1])
        whole, result = sweep(folder, methods, lengths, files)
        half, _ = sweep(folder, methods, [length // 2 for length in lengths], files)
        every = 1 if quick else 4
        chosen = [(m, n) for i, m in enumerate(methods) for j, n in enumerate(lengths) if (i + j) % every == 0]
        began, differences = time.perf_counter(), []
        for method, length in chosen:
            ours = perplexity(result, methods.index(method), length)
            differences.append(abs(ours - script(folder, method, length, files)) / ours)
        scripts = (time.perf_counter() - began) / len(chosen) * len(methods) * len(lengths)
    report.add("sweep, from the start of the process", f"{whole:.1f} s", f"{len(methods)} methods")
    report.add("scripts", f"{scripts:.0f} s", f"{len(chosen)} of {len(methods) * len(lengths)} run, scaled up")
    report.add("times faster", f"{scripts / whole:.1f}", "goal 10")
    report.add("largest relative difference of perplexity", f"{max(differences):.1e}", f"over {len(chosen)} pairs")
    report.add("all lengths doubled", f"{whole / half:.2f} times as long", "attention alone would be 4 times")
    return report


def documents(folder: Path, tokens: int) -> list[Path]:
    """Three books, or pieces of the language reference, with more than ``tokens`` tokens each."""
    books = sorted((SHARED / "corpora" / "heldout").glob("*.txt"))[:3]
    if len(books) == 3:
        texts = [book.read_text(encoding="utf-8")[: 8 * tokens] for book in books]
    else:
        reference = language_reference()
        texts = [reference[i * 8 * tokens : (i + 1) * 8 * tokens] for i in range(3)]
    files = [folder / f"{index}.txt" for index in range(3)]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text, encoding="utf-8")
    return files


def sweep(folder: Path, methods: list[dict[str, Any]], lengths: list[int], files: list[Path]) -> tuple[float, Any]:
    """Seconds of a process that starts, loads, measures and ends; and its result."""
    arguments = [str(folder), json.dumps(methods), json.dumps(lengths), *map(str, files)]
    began = time.perf_counter()
    answer = _python("benchmarks.speed.sweep_speed", *arguments)
    return time.perf_counter() - began, SweepResult.model_validate_json(answer)


def script(folder: Path, method: dict[str, Any], length: int, files: list[Path]) -> float:
    """The perplexity that the script of today gives."""
    arguments = [str(folder), json.dumps(method), str(length), *map(str, files)]
    return float(_python("benchmarks.speed.one_setting", *arguments))


def perplexity(result: SweepResult, method: int, length: int) -> float:
    """The sweep's number; ``methods`` begin with the checkpoint's own encoding, which the sweep adds where missing."""
    (part,) = result.evaluations
    return next(at.perplexity for at in part.methods[method].lengths if at.length == length)  # type: ignore[attr-defined]


def _python(module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()[-1]


def child(folder: str, methods: str, lengths: str, files: list[str]) -> SweepResult:
    """The sweep itself, through the plan that a request makes."""
    settings = Settings(model=folder, dtype="float32", device="cpu", threads=2, _env_file=None)
    models = ModelRegistry(settings)
    try:
        texts = [Path(file).read_text(encoding="utf-8") for file in files]
        part = {"evaluation": "perplexity", "input": texts, "bos": "always"}
        body = SweepRequest(methods=json.loads(methods), lengths=json.loads(lengths), evaluations=[part])
        result: SweepResult = finish(evaluate(plan_of(body, models, settings)))
        return result
    finally:
        models.close()


if __name__ == "__main__":
    torch.set_num_threads(2)
    print(child(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]).model_dump_json())
