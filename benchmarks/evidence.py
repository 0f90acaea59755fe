"""The measured tables of docs/evidence.md, made from the numbers that ``--record`` left beside the results.

``python -m benchmarks.evidence`` writes them in between the page's markers; recording does so too. What stands around
them, the published tables and the words, is written by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.dynamic_consistency import LABELS
from service.evaluation.tables import short_number

ROOT = Path(__file__).resolve().parent.parent
PAGE, RECORDED = ROOT / "docs" / "evidence.md", ROOT / "benchmarks"
MARKED = re.compile(r"<!-- measured:(\w+):start -->\n(.*?)<!-- measured:\1:end -->", re.S)
Numbers = dict[str, dict[str, Any]]

METHODS: dict[str, tuple[str, ...]] = {
    "training_free": (
        *("default", "rerope", "dynamic_linear", "dynamic_yarn", "dynamic", "ntk", "yarn"),
        *("self_extend", "dual_chunk"),
    ),
    "interpolation": ("default", "linear", "dynamic_linear"),
    "factors": ("default", "linear", "ntk", "ntk_by_parts", "yarn", "yarn_paper", "llama3", "mrrope_pro"),
    "windows": ("default", "lm_infinite", "streaming", "self_extend"),
    "biases": ("default", "alibi", "none"),
}
"""Table -> its rows, for every model that has all of these methods; each with all the settings that were measured."""


def recorded(folder: Path = RECORDED) -> Numbers:
    """The numbers of every benchmark that the page shows."""
    return {name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in SOURCES}


def filled(page: str, numbers: Numbers) -> str:
    """``page`` with every marked table made anew.

    Raises:
        KeyError: for a marker that names no table.
    """

    def anew(found: re.Match[str]) -> str:
        name = found[1]
        return f"<!-- measured:{name}:start -->\n{table(name, numbers)}\n<!-- measured:{name}:end -->"

    return MARKED.sub(anew, page)


def table(name: str, numbers: Numbers) -> str:
    """One table, or for the name of a benchmark how it was measured."""
    if name in SOURCES:
        return "\n".join(f"- {note}" for note in [*numbers[name]["notes"], numbers[name]["machine"]])
    if name in METHODS:
        return _markdown(_by_method(METHODS[name], numbers["method_table"]))
    return _markdown(TABLES[name](numbers))


def _by_method(names: tuple[str, ...], numbers: dict[str, Any]) -> Iterator[list[str]]:
    yield ["model", "method", *(f"{multiple}x" for multiple in numbers["multiples"])]
    for model in numbers["models"]:
        rows = [entry for entry in model["methods"] if entry["method"] in names]
        if {entry["method"] for entry in rows} == set(names):
            for entry in rows:
                yield [model["model"], f"`{entry['label']}`", *map(short_number, entry["perplexity"])]


def _consistency(numbers: Numbers) -> Iterator[list[str]]:
    yield ["model", "length", *LABELS.values()]
    for model in numbers["dynamic_consistency"]["models"]:
        for index, length in enumerate(model["lengths"]):
            times = f"{length} ({length / model['trained_length']:g}x)"
            yield [model["model"], times, *(short_number(model[key][index]) for key in LABELS)]


SOURCES = ("method_table", "dynamic_consistency")
TABLES: dict[str, Callable[[Numbers], Iterator[list[str]]]] = {"consistency": _consistency}


def _markdown(rows: Iterator[list[str]]) -> str:
    header, *body = rows
    lines = [header, ["---", "---", *["---:"] * (len(header) - 2)], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def update() -> None:
    """Write the page."""
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), recorded()), encoding="utf-8")


if __name__ == "__main__":
    update()
