"""Timing by interleaved runs: the compared things take turns, so that a busy machine slows all of them alike.

A figure is the median of each round's ratio. Nothing here passes or fails: a benchmark prints what it found.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from benchmarks.paths import RECORDED
from service.machine.cpus import processor


@dataclass(frozen=True)
class Timings:
    """Seconds per round of each thing compared; index i of every list is the same round."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, base: str) -> float:
        """Median over rounds of seconds(name) / seconds(base)."""
        return statistics.median(self.ratios(name, base))

    def ratios(self, name: str, base: str) -> list[float]:
        return [a / b for a, b in zip(self.seconds[name], self.seconds[base], strict=True)]

    def spread(self, name: str, base: str) -> str:
        """The middle half of the rounds' ratios, as text."""
        ratios = sorted(self.ratios(name, base))
        return f"{ratios[len(ratios) // 4]:.3f} .. {ratios[-1 - len(ratios) // 4]:.3f}"


def interleaved(
    runs: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 1, limit_s: float = float("inf")
) -> Timings:
    """Time every run once per round, for ``rounds`` or until a round ends after ``limit_s`` seconds.

    Each round starts with the next run, so that none is always first.
    """
    names = list(runs)
    for _ in range(warmup):
        for name in names:
            runs[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    started = time.perf_counter()
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            _synchronize()
            began = time.perf_counter()
            runs[name]()
            _synchronize()
            seconds[name].append(time.perf_counter() - began)
        if time.perf_counter() - started > limit_s:
            break
    return Timings(seconds)


def finish(work: Any) -> Any:
    """Run a generator to its end and give its value."""
    try:
        while True:
            next(work)
    except StopIteration as stop:
        return stop.value


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass
class Report:
    """One benchmark's table. ``notes`` are lines below it: what was absent, what a figure means.

    ``pictures`` (PNG by name) and ``numbers`` (what JSON can hold) are written into a folder beside the results file.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    pictures: dict[str, bytes] = field(default_factory=dict)
    numbers: dict[str, Any] | None = None

    def add(self, *cells: Any) -> None:
        self.rows.append(tuple(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells))

    def print(self) -> None:
        table = Table(*self.columns, title=f"{self.name}: {self.title}", title_justify="left")
        for row in self.rows:
            table.add_row(*row)
        console = Console()
        console.print(table)
        for note in [*self.notes, machine()]:
            console.print(note, style="dim", markup=False, highlight=False)

    def markdown(self) -> str:
        """The report as a section of RESULTS.md."""
        lines = [f"## {self.name}", "", f"{self.title}. {machine()}.", ""]
        lines += ["| " + " | ".join(self.columns) + " |", "|" + "---|" * len(self.columns)]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in self.rows]
        if self.notes:
            lines += ["", *(f"- {note}" for note in self.notes)]
        for name in self.pictures:
            lines += ["", f"![{name}]({RECORDED.name}/{name}.png)"]
        return "\n".join(lines) + "\n"


def write(report: Report, path: Path) -> None:
    """Replace the report's section in ``path``, or add it at the end; a folder beside it has pictures and numbers."""
    head, *sections = path.read_text(encoding="utf-8").split("\n## ")
    kept = {section.partition("\n")[0].strip(): "## " + section.strip() + "\n" for section in sections}
    kept[report.name] = report.markdown()
    path.write_text("\n".join([head.strip() + "\n", *kept.values()]), encoding="utf-8")
    folder = path.parent / RECORDED.name
    folder.mkdir(exist_ok=True)
    for name, picture in report.pictures.items():
        (folder / f"{name}.png").write_bytes(picture)
    if report.numbers is not None:
        recorded = {"machine": machine(), "notes": report.notes, **report.numbers}
        (folder / f"{report.name}.json").write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")


def machine() -> str:
    """Processor or card, threads, load, versions and date: what a figure is worth without."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        device = f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return (
        f"{device}; load {os.getloadavg()[0]:.1f}; Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}; {date.today().isoformat()}"
    )
