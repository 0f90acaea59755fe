"""``ropeway methods`` and ``ropeway models``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from service.cli.shared.client import connected
from service.cli.shared.files import check_folder, refuse_several
from service.cli.shared.options import AsJson, ModelName, Server, method_names
from service.cli.shared.terminal import fail, new_table, print_table, stdout
from service.evaluation.formatting import printable
from service.reports.schema import default_text, type_text

if TYPE_CHECKING:
    from service.client import ModelInfo

FACTS = {
    "formula": "formula",
    "use for": "use",
    "not for": "avoid",
    "reach": "reach",
    "without tuning": "training_free",
    "evidence": "evidence",
    "paper": "paper",
    "cost": "cost",
    "keys rotate": "rotates_at",
    "family": "family",
}
"""The printed facts of a method: label and key."""


def methods(
    name: Annotated[
        str | None,
        typer.Argument(help="One method in full, with all its parameters.", autocompletion=method_names),
    ] = None,
    as_json: AsJson = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table of all methods.")] = False,
    docs: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write the generated pages and their pictures here."),
    ] = None,
) -> None:
    """Every positional encoding a request can choose, or one with its parameters. Needs no model."""
    from patches import METHODS, describe_method, describe_methods

    if name is not None and name not in METHODS:
        from patches import unknown_method

        fail(unknown_method(name))
    refuse_several({"--json": as_json, "--markdown": markdown, "--docs": docs})
    if name is not None and (markdown or docs is not None):
        raise typer.BadParameter("--markdown and --docs have every method: leave out the name", param_hint="NAME")
    if docs is not None:
        check_folder("--docs", docs)
    if docs is not None or markdown:
        from service.docs.methods import overview

        typer.echo(overview() if docs is None else f"{_written(docs)} files written to {docs}")
    elif as_json:
        typer.echo(json.dumps(describe_method(name) if name else describe_methods(), indent=2))
    elif name is None:
        print_table(_all_methods(describe_methods()))
    else:
        _print_method(describe_method(name))


def _written(docs: Path) -> int:
    from service.docs.pages import write_docs

    try:
        return len(write_docs(docs))
    except OSError as error:
        fail(f"{error.filename or docs}: {error.strerror}")


def models(
    model: ModelName = None,
    as_json: AsJson = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Name memory and the products of linear layers too.")
    ] = False,
    server: Server = None,
) -> None:
    """The models of a server, or those that `ropeway serve` would serve."""
    with connected(server, model) as client:
        served = client.models()
    if as_json:
        typer.echo(json.dumps([info.model_dump() for info in served], indent=2))
        return
    numbers = ("parameters", "trained\nlength", "longest")
    table = new_table("model", *numbers, "device", "engine", numbers=numbers)
    notes: list[str] = []
    for info in served:
        notes += _notes(info, verbose=verbose)
        counts = [f"{count:,}" for count in (info.parameters, info.trained_length, info.max_length)]
        numbers_in = info.dtype if info.quantization is None else f"{info.dtype}, {info.quantization.scheme}"
        numbers_in += ", packed" if info.packed_weights else ""
        engine = info.engine if info.attention == "segments" else f"{info.engine}, {info.attention}"
        engine += ", CUDA graphs" if info.cuda_graphs else ""
        engine += ", recorded steps" if info.recorded_steps else ""
        table.add_row(info.id, *counts, f"{info.device} {numbers_in}", engine)
    table.caption = Text("\n".join(notes))
    print_table(table)


def _notes(info: ModelInfo, *, verbose: bool) -> list[str]:
    """Lines below the table: variants, the reason for a slower engine, and ``verbose`` memory and products."""
    lines = [f"variant of {info.id} for {kind}: {name}" for kind, name in info.variants.items()]
    if info.engine_reason is not None:
        lines.append(f"engine of {info.id}: {printable(info.engine_reason)}")
    if verbose:
        lines.append(
            f"memory of {info.id}: weights {info.memory.weights >> 20:,} MiB, cache {info.memory.cache >> 20:,} MiB"
        )
    if info.products and verbose:
        lines.append(f"products of {info.id}: {'; '.join(info.products)}")
    return lines


def _all_methods(known: list[dict[str, Any]]) -> Table:
    table = new_table("method", "what it does", "cost")
    for info in known:
        table.add_row(Text(info["method"], style="bold"), *map(Text, (info["summary"], info["cost"])))
    table.caption = "ropeway methods NAME: its formula, parameters, use, reach, evidence"
    return table


def _print_method(info: dict[str, Any]) -> None:
    stdout.print(Text(info["method"], style="bold"))
    stdout.print(Text(info["summary"]))
    facts = Table.grid(padding=(0, 2))
    for label, key in FACTS.items():
        text = info[key].replace("cache_", "at cache ") if key == "rotates_at" else info[key]
        facts.add_row(Text(label, style="dim"), Text(text))  # a plain string would lose its [brackets] as markup
    stdout.print(facts)
    schema = info["parameters"]
    table = new_table("parameter", "type", "default", "meaning")
    for name, field in schema["properties"].items():
        if name != "method":
            cells = (type_text(field), default_text(name, schema), field.get("description", ""))
            table.add_row(Text(name, style="bold"), *map(Text, cells))
    print_table(table)
