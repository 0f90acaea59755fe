"""``python -m benchmarks [NAME ...]``: list and run the benchmarks."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer

from benchmarks.paths import RESULTS
from benchmarks.quality import evidence
from benchmarks.timing import write

FOLDERS = {
    "speed": (
        "scoring_memory",
        "scoring_speed",
        "curve_speed",
        "generate_speed",
        "sampled_rows",
        "patched_overhead",
        "sweep_speed",
        "method_cost",
    ),
    "quality": (
        "scoring_equality",
        "recommend_regret",
        "method_table",
        "recall_table",
        "search_table",
        "quantization",
        "auto_mixture",
        "dynamic_consistency",
    ),
    "servers": (
        "peers",
        "load",
        "siege",
    ),
    "replicas": (
        "affinity",
        "simulation_times",
        "simulation_check",
        "simulation_scale",
        "job_sharing",
    ),
}
"""Benchmarks by folder. ``gpu_suite`` is a separate command: ``python -m benchmarks.gpu_suite``."""

MODULES = {name: f"benchmarks.{folder}.{name}" for folder, names in FOLDERS.items() for name in names}


def main(
    names: Annotated[list[str] | None, typer.Argument(help=f"Any of: {', '.join(MODULES)}; all when absent.")] = None,
    quick: Annotated[bool, typer.Option(help="A few rounds only: does it run, not what does it measure.")] = False,
    record: Annotated[
        bool, typer.Option(help="Write the tables into benchmarks/RESULTS.md and docs/evidence.md.")
    ] = False,
    clients: Annotated[int, typer.Option(min=1, help="load: clients at once.")] = 200,
    seconds: Annotated[float, typer.Option(min=1, help="load, siege: how long they go on.")] = 180,
    list_only: Annotated[bool, typer.Option("--list", help="Print what there is.")] = False,
) -> None:
    """Measure Ropeway against plain transformers; prints tables of ratios."""
    unknown = sorted(set(names or ()) - set(MODULES))
    if unknown:
        raise typer.BadParameter(f"no benchmark {', '.join(unknown)}; there are: {', '.join(MODULES)}")
    shown = False
    for name in names or MODULES:
        module = importlib.import_module(MODULES[name])
        if list_only:
            typer.echo(f"{name:18} {(module.__doc__ or '').splitlines()[0]}")
            continue
        timed: dict[str, dict[str, Any]] = {"load": {"clients": clients}, "siege": {}}
        options = timed[name] | {"seconds": seconds} if name in timed else {}
        report = module.run(quick=quick, **options)
        if quick:
            report.notes.append("a quick run: its ratios are preliminary")
        report.print()
        if record and report.rows:  # nothing measured replaces nothing recorded
            write(report, RESULTS)
            shown |= name in evidence.SOURCES
    if shown:
        evidence.update()


if __name__ == "__main__":
    typer.run(main)
