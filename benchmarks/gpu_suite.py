"""Everything worth knowing from a GPU at hand, in one command under nine minutes: ``python -m benchmarks.gpu_suite``.

Needs no network and no data. A part that fails or no longer fits the budget loses only its own rows. Each row is
printed and written to the JSON file as soon as it is known. ``--smoke`` runs every part on the CPU with tiny shapes.
"""

from __future__ import annotations

import gc
import json
import math
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.gpu import checks, decoding, forwards
from benchmarks.gpu.scale import GPU, SMOKE, Row, Scale, peak, reset_peak
from benchmarks.timing import Report, machine
from service.machine.heap import frozen

PARTS: tuple[tuple[Callable[[Scale], Iterator[Row]], float], ...] = (
    (checks.tests, 120),
    (forwards.roofline, 10),
    (decoding.decode_8b, 60),
    (decoding.crowd_8b, 150),
    (decoding.long_context, 60),
    (forwards.scoring_rate, 40),
    (decoding.graphs, 60),
    (decoding.attentions, 60),
    (decoding.decode_1b, 100),
    (forwards.patched_forward, 40),
    (decoding.outside_model, 20),
    (decoding.memory_128k, 60),
    (decoding.windows, 90),
)
"""Each part, and the seconds it may need: what no longer fits is skipped. The goals come first."""


def main(
    smoke: Annotated[bool, typer.Option(help="Tiny shapes on the CPU: tests the code, measures nothing.")] = False,
    out: Annotated[Path, typer.Option(help="Path of the JSON.")] = Path("gpu_suite.json"),
    budget: Annotated[float, typer.Option(help="Seconds for everything.")] = 510.0,
    only: Annotated[list[str] | None, typer.Option(help="Parts to run, beside the rates of the device.")] = None,
) -> None:
    """Run the tests that need a CUDA device, measure on it, print one table."""
    names = [part.__name__ for part, _ in PARTS]
    if unknown := set(only or ()) - set(names):
        raise typer.BadParameter(f"--only: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    if not smoke and not torch.cuda.is_available():
        raise typer.BadParameter("no CUDA device: use --smoke to try the code on the CPU")
    torch.backends.cuda.enable_cudnn_sdp(False)  # as served: it would plan for seconds, for us and for transformers
    scale = SMOKE if smoke else GPU
    began = time.monotonic()
    report = Report(
        "gpu_suite", "smoke run, no measurement" if smoke else "one card", ("part", "what", "value", "remark")
    )
    results: list[dict[str, Any]] = []
    with frozen():  # transformers collects garbage twice whenever an engine stops
        for part, seconds in PARTS:
            if only and part.__name__ not in (*only, forwards.roofline.__name__):
                continue
            left = budget - (time.monotonic() - began)
            skipped = f"skipped: needs up to {seconds:.0f} s and {left:.0f} s are left" if left < seconds else None
            run_part(part.__name__, lambda part=part: part(scale), scale, results, out, skipped)
    for result in results:
        value = "" if result["value"] is None else f"{result['value']:.4g} {result['unit']}"
        report.add(result["part"], result["what"], value, result["remark"])
    report.notes.append(f"{time.monotonic() - began:.0f} s in all; JSON in {out}")
    report.print()
    if any(result["failed"] for result in results):
        raise typer.Exit(1)


def run_part(
    name: str,
    part: Callable[[], Iterator[Row]],
    scale: Scale,
    results: list[dict[str, Any]],
    out: Path,
    skipped: str | None = None,
) -> None:
    """Append the part's rows, its error or why it was skipped, and its time and peak memory."""

    def add(what: str, value: float | None, unit: str, remark: str, failed: bool = False) -> None:
        value = None if value is None or math.isnan(value) else value
        results.append({"part": name, "what": what, "value": value, "unit": unit, "remark": remark, "failed": failed})
        print(name, what, value, unit, remark, sep=" | ", flush=True)
        write_json(out, results)

    if skipped:
        add("not run", None, "", skipped)
        return
    began = time.monotonic()
    reset_peak(scale)
    try:
        for row in part():
            add(*row, failed=row[3].startswith("failed"))
    except Exception as error:
        traceback.print_exc()
        add("failed", None, "", f"{type(error).__name__}: {str(error)[:200]}", failed=True)
    memory = f"peak memory {peak(scale) / 1e9:.2f} GB" if peak(scale) else ""
    add("whole part", time.monotonic() - began, "s", memory)
    gc.collect()
    if scale.device == "cuda":
        torch.cuda.empty_cache()


def write_json(path: Path, results: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps({"machine": machine(), "results": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
