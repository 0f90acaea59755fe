"""``ropeway methods`` and ``ropeway models``: what there is to choose from."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from service.cli.client import ask, connected
from service.cli.options import ModelName, Server
from service.cli.terminal import fail, stdout

AsJson = Annotated[bool, typer.Option("--json", help="Print as JSON.")]


def methods(
    name: Annotated[str | None, typer.Argument(help="One method, with all its parameters.")] = None,
    as_json: AsJson = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of the README.")] = False,
) -> None:
    """Every positional encoding a request can choose, or one with its parameters. Needs no model."""
    from patches import describe_methods

    known = {info["method"]: info for info in describe_methods()}
    if name is not None and name not in known:
        fail(f"unknown method {name!r}: one of {', '.join(known)}")
    if as_json:
        typer.echo(json.dumps(known[name] if name else list(known.values()), indent=2))
    elif markdown:
        typer.echo(methods_markdown(list(known.values())))
    elif name is None:
        stdout.print(_all_methods(list(known.values())))
    else:
        _print_method(known[name])


def models(model: ModelName = None, as_json: AsJson = False, server: Server = None) -> None:
    """The models of a server, or those that `ropeway serve` would serve."""
    with connected(server, model) as client:
        served = ask(client, "GET", "/models")["models"]
    if as_json:
        typer.echo(json.dumps(served, indent=2))
        return
    numbers = ("parameters", "trained length", "longest")
    table = _table("model", *numbers, "device", "variants", numbers=numbers)
    for info in served:
        variants = ", ".join(f"{kind}: {name}" for kind, name in info["variants"].items())
        counts = [f"{info[key]:,}" for key in ("parameters", "trained_length", "max_length")]
        table.add_row(info["id"], *counts, f"{info['device']} {info['dtype']}", variants)
    stdout.print(table)


def _all_methods(known: list[dict[str, Any]]) -> Table:
    table = _table("method", "what it does", "cost")
    for info in known:
        table.add_row(Text(info["method"], style="bold"), info["summary"], info["cost"])
    table.caption = "ropeway methods NAME: its parameters, paper and what to expect without tuning"
    table.caption_justify = "left"
    return table


def methods_markdown(known: list[dict[str, Any]]) -> str:
    """The methods as a Markdown table; the README holds it and a test compares."""
    rows = ["| method | what it does | paper | without tuning | keys rotate |", "|---|---|---|---|---|"]
    for info in known:
        rotates_at = info["rotates_at"].replace("cache_", "at cache ")
        cells = [f"`{info['method']}`", info["summary"], info["paper"], info["training_free"], rotates_at]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _print_method(info: dict[str, Any]) -> None:
    stdout.print(Text(info["method"], style="bold"))
    stdout.print(Text(info["summary"]))
    facts = Table.grid(padding=(0, 2))
    facts.add_row(Text("paper", style="dim"), info["paper"])
    facts.add_row(Text("without tuning", style="dim"), info["training_free"])
    facts.add_row(Text("cost", style="dim"), info["cost"])
    facts.add_row(Text("keys rotate", style="dim"), info["rotates_at"].replace("_", " "))
    stdout.print(facts)
    schema = info["parameters"]
    table = _table("parameter", "type", "default", "meaning")
    for name, field in schema["properties"].items():
        if name != "method":
            default = "required" if name in schema.get("required", []) else json.dumps(field.get("default"))
            table.add_row(Text(name, style="bold"), _type(field), default, field.get("description", ""))
    stdout.print(table)


def _type(field: dict[str, Any]) -> str:
    """A JSON schema in a few words, bounds included: ``number, 1 to 4096``."""
    kinds = [kind for kind in field.get("anyOf", [field]) if kind.get("type") != "null"]
    return " or ".join(_one_type(kind) for kind in kinds)


def _one_type(kind: dict[str, Any]) -> str:
    name = kind.get("type", "value")
    if name == "array":
        return f"list of {_one_type(kind.get('items', {}))}"
    low = kind.get("minimum", kind.get("exclusiveMinimum"))
    high = kind.get("maximum", kind.get("exclusiveMaximum"))
    above = "above " if "exclusiveMinimum" in kind else "from "
    parts = [f"{above}{_number(low)}" if low is not None else "", f"up to {_number(high)}" if high is not None else ""]
    return " ".join(part for part in [name, *parts] if part)


def _number(value: float) -> str:
    return f"{value:,}" if abs(value) < 1e9 else f"{value:g}"


def _table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", justify="right" if column in numbers else "left")
    return table
