"""``ropeway perplexity``: a sweep over encodings and lengths, as table, picture, CSV or JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.text import Text

from service.cli.client import connected
from service.cli.files import check_outputs, documents, picture, save
from service.cli.options import Encodings, ModelName, Server, check_body, encodings, lengths
from service.cli.progress import progress
from service.cli.terminal import printable, stdout

if TYPE_CHECKING:
    from service.client import PerplexityResult, Ropeway
    from service.client import Progress as Scored

Files = Annotated[
    list[str] | None,
    typer.Argument(metavar="[FILE]...", help="Text files, each a document; '-' is stdin. None: a built-in document."),
]
Lengths = Annotated[
    str | None,
    typer.Option(
        "--lengths",
        help="256,512 or start:stop:step.",
        metavar="LIST",
        show_default="doubling from the trained length",
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        min=2,
        max=(1 << 24) - 1,
        help="Tokens of each document that are used; longer ones are cut.",
        show_default="all",
    ),
]
Protocol = Annotated[
    Literal["curve", "sliding", "disjoint", "tail", "rolling"] | None,
    typer.Option(help="Which tokens get which context.", show_default="curve"),
]
Plots = Annotated[
    list[Path] | None, typer.Option("--plot", metavar="FILE", help="Save the curve as .png or .html; repeatable.")
]


def perplexity(  # noqa: PLR0913 - one argument per option
    files: Files = None,
    pe: Encodings = None,
    lengths_: Lengths = None,
    max_tokens: MaxTokens = None,
    protocol: Protocol = None,
    stride: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="sliding, tail: tokens from window to window.",
            show_default="sliding 256, tail the longest length",
        ),
    ] = None,
    tail: Annotated[
        int | None, typer.Option(min=1, help="tail: tokens scored at the end of each window.", show_default="256")
    ] = None,
    bos: Annotated[
        Literal["auto", "always", "never"] | None,
        typer.Option(help="BOS at the start of every window.", show_default="auto"),
    ] = None,
    model: ModelName = None,
    plots: Plots = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole result as JSON.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print every number as CSV.")] = False,
    server: Server = None,
) -> None:
    """Perplexity against context length under every --method, on FILEs or the built-in document."""
    check_outputs(plots, as_json=as_json, as_csv=as_csv)
    names, texts = documents(files or [])
    request = {
        "input": texts,
        "methods": encodings(pe, check=server is None),
        "lengths": lengths(lengths_),
        "max_tokens": max_tokens,
        "protocol": protocol,
        "stride": stride,
        "tail": tail,
        "bos": bos,
        "model": model if server else None,
    }
    if server is None:
        from service.evaluation.bodies import BODIES

        check_body(BODIES["perplexity"], request)
    with connected(server, model) as client:
        result = sweep(client, request)
    for document, name in zip(result.documents, names, strict=False):
        document.name = name
    _print(result, as_json, as_csv)
    for path in plots or []:
        save(path, picture(result, path))


def sweep(client: Ropeway, request: dict[str, Any]) -> PerplexityResult:
    """Run one ``POST /perplexity`` and show how far it is.

    Raises:
        RopewayError: when the server answers with an error.
    """
    with progress() as show:

        def told(scored: Scored) -> None:
            show(scored.tokens_done, scored.tokens_total, scored.label)

        return client.perplexity(**request, on_progress=told)


def print_table(result: PerplexityResult) -> None:
    """What was measured, then the numbers."""
    from service.evaluation.perplexity.tables import heading, perplexity_rich

    stdout.print(Text(printable(heading(result)), style="bold"))
    stdout.print(perplexity_rich(result))


def _print(result: PerplexityResult, as_json: bool, as_csv: bool) -> None:
    from service.evaluation.tables import csv_of

    if as_json:
        typer.echo(result.model_dump_json(indent=2))
    elif as_csv:
        typer.echo(csv_of(result), nl=False)
    else:
        print_table(result)
