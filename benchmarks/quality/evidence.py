"""The measured tables of docs/evidence.md, method-table.md and quantization.md.

They are made from the numbers that ``--record`` left beside the results. ``python -m benchmarks.quality.evidence``
writes them in between the pages' markers; recording does so too. Published tables and the words around them are written
by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.paths import RECORDED, ROOT
from benchmarks.quality import quantization, search_table
from benchmarks.quality.dynamic_consistency import LABELS
from patches import label_of, parse
from service.evaluation.formatting import percent, short_number

PAGES = tuple(ROOT / "docs" / f"{name}.md" for name in ("evidence", "method-table", "quantization"))
MARKED = re.compile(r"<!-- measured:([\w-]+):start -->\n(.*?)<!-- measured:\1:end -->", re.S)
WHOLE = "all-"
"""Before a model's name: every method of it, with intervals."""
HASHED = re.compile(r"(\w+)=#\w{6}")
"""A list of numbers in a label."""
MOST_SHOWN = 2
"""Numbers of a list that a table has room for."""
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
    if name.startswith(WHOLE):
        return _markdown(_whole(name.removeprefix(WHOLE), numbers["method_table"]))
    if name in METHODS:
        return _markdown(_by_method(METHODS[name], numbers["method_table"]))
    return _markdown(TABLES[name](numbers))


def _by_method(names: tuple[str, ...], numbers: dict[str, Any]) -> Iterator[list[str]]:
    yield ["model", "method", *(f"{multiple}x" for multiple in numbers["multiples"])]
    for model in numbers["models"]:
        rows = [entry for entry in model["methods"] if entry["method"] in names]
        if {entry["method"] for entry in rows} == set(names):
            for entry in rows:
                yield [model["model"], f"`{named(entry)}`", *map(short_number, entry["perplexity"])]


def named(entry: dict[str, Any]) -> str:
    """The label of an entry's request with its lists. A short list is written out, a long one is ``[…]``."""

    def written(found: re.Match[str]) -> str:
        numbers = entry["request"][found[1]]
        return f"{found[1]}={json.dumps(numbers) if len(numbers) <= MOST_SHOWN else '[…]'}"

    return HASHED.sub(written, label_of(parse(entry["request"])))


def _whole(model: str, numbers: dict[str, Any]) -> Iterator[list[str]]:
    """All methods of one model, best first at the longest length; an interval under every number."""
    (measured,) = (entry for entry in numbers["models"] if entry["model"] == model)
    yield ["", "method", *(f"{multiple}x" for multiple in numbers["multiples"])]
    for rank, entry in enumerate(sorted(measured["methods"], key=lambda entry: entry["perplexity"][-1]), 1):
        yield [str(rank), f"`{named(entry)}`", *map(_with_interval, entry["perplexity"], entry["interval"])]


def _with_interval(value: float, interval: list[float] | None) -> str:
    low_high = "" if interval is None else f" <sub>{short_number(interval[0])} to {short_number(interval[1])}</sub>"
    return f"{short_number(value)}{low_high}"


def _consistency(numbers: Numbers) -> Iterator[list[str]]:
    yield ["model", "length", *LABELS.values()]
    for model in numbers["dynamic_consistency"]["models"]:
        for index, length in enumerate(model["lengths"]):
            times = f"{length} ({length / model['trained_length']:g}x)"
            yield [model["model"], times, *(short_number(model[key][index]) for key in LABELS)]


def _recall(numbers: Numbers) -> Iterator[list[str]]:
    """Passkeys found, with the interval, over perplexity."""
    table = numbers["recall_table"]
    yield ["model", "method", *(f"{multiple}x" for multiple in table["multiples"])]
    for model in table["models"]:
        for entry in model["methods"]:
            recall = zip(entry["recall"], entry["interval"], strict=True)
            found = [f"{percent(share)} <sub>{percent(low)} to {percent(high)}</sub>" for share, (low, high) in recall]
            cells = [f"{a}<br>{short_number(b)}" for a, b in zip(found, entry["perplexity"], strict=True)]
            yield [model["model"], f"`{entry['label']}`", *cells]


def _quantization_perplexity(numbers: Numbers) -> Iterator[list[str]]:
    table = numbers["quantization"]
    yield ["model", "method", "weights", *(f"{multiple}x" for multiple in table["multiples"])]
    for entry in table["models"]:
        for model, method, *cells in quantization.rows(entry["model"], entry["formats"]):
            yield [model, f"`{method}`", *cells]


def _quantization_cost(numbers: Numbers) -> Iterator[list[str]]:
    cost = numbers["quantization"]["cost"]
    yield ["weights", "bytes", *cost[0]["seconds"]]
    for entry in cost:
        ratios = [entry["bytes"] / cost[0]["bytes"], *entry["seconds"].values()]
        yield [entry["scheme"], *(f"{ratio:.2f}" for ratio in ratios)]


def _search(numbers: Numbers) -> Iterator[list[str]]:
    """Perplexity of each search at the small budget, and of the encodings beside it."""
    others = [f"`{name}`" for name in search_table.OTHERS]
    yield ["model", "length", "search", *others, "cos and sin", "`yarn` / search"]
    for entry in numbers["search_table"]["searches"]:
        if _budget(entry) == search_table.SMALL:
            perplexity = map(short_number, search_table.perplexities(entry))
            factor, ratio = f"{entry['attention_factor']:.3f}", search_table.ratio(entry["others"]["yarn"])
            yield [entry["model"], f"{entry['times']}x", *perplexity, factor, ratio]


def _search_budgets(numbers: Numbers) -> Iterator[list[str]]:
    """Searches of one model and length at several budgets."""
    searches = numbers["search_table"]["searches"]
    last = searches[-1]
    yield ["model", "population x generations", "candidates", "loss of the search", "perplexity", "`yarn` / search"]
    for entry in searches:
        if (entry["model"], entry["times"]) == (last["model"], last["times"]):
            budget = " x ".join(map(str, _budget(entry)))
            loss, perplexity = f"{entry['best'][-1]:.4f}", f"{entry['perplexity']:.2f}"
            ratio = search_table.ratio(entry["others"]["yarn"])
            yield [entry["model"], budget, str(entry["candidates"]), loss, perplexity, ratio]


def _budget(entry: dict[str, Any]) -> search_table.Budget:
    return search_table.Budget(entry["population"], entry["generations"])


SOURCES = ("method_table", "dynamic_consistency", "recall_table", "quantization", "search_table")
TABLES: dict[str, Callable[[Numbers], Iterator[list[str]]]] = {
    "consistency": _consistency,
    "recall": _recall,
    "search": _search,
    "search-budgets": _search_budgets,
    "quantization-perplexity": _quantization_perplexity,
    "quantization-cost": _quantization_cost,
}


def _markdown(rows: Iterator[list[str]]) -> str:
    header, *body = rows
    lines = [header, ["---", "---", *["---:"] * (len(header) - 2)], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def update() -> None:
    """Write the pages."""
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8"), recorded()), encoding="utf-8")


if __name__ == "__main__":
    update()
