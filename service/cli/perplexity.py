"""``ropeway perplexity``: a sweep over encodings and lengths, as table, picture, CSV or JSON."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from service.cli.client import connected
from service.cli.options import Encodings, ModelName, Server, encodings, lengths
from service.cli.terminal import fail, printable, stderr, stdout
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
        help="256,512 or start:stop:step; doubling from the trained length.",
        metavar="LIST",
    ),
]
Protocol = Annotated[
    Literal["curve", "sliding", "disjoint", "tail", "rolling"] | None,
    typer.Option(help="Which tokens get which context."),
]
Plots = Annotated[
    list[Path] | None, typer.Option("--plot", metavar="FILE", help="Save the curve as .png or .html; repeatable.")
]


def perplexity(  # noqa: PLR0913 - one argument per option
    files: Files = None,
    pe: Encodings = None,
    lengths_: Lengths = None,
    protocol: Protocol = None,
    stride: Annotated[int | None, typer.Option(help="sliding, tail: tokens from window to window.")] = None,
    tail: Annotated[int | None, typer.Option(help="tail: tokens scored at the end of each window.")] = None,
    bos: Annotated[
        Literal["auto", "always", "never"] | None, typer.Option(help="BOS at the start of every window.")
    ] = None,
    model: ModelName = None,
    plots: Plots = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole result as JSON.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print every number as CSV.")] = False,
    server: Server = None,
) -> None:
    """Perplexity against context length under every --method, on FILEs or the built-in document."""
    if as_json and as_csv:
        raise typer.BadParameter("--json and --csv exclude each other")
    for path in plots or []:
        check_plot(path)
    names, texts = documents(files or [])
    request = {
        "input": texts,
        "methods": encodings(pe, check=server is None),
        "lengths": lengths(lengths_),
        "protocol": protocol,
        "stride": stride,
        "tail": tail,
        "bos": bos,
        "model": model if server else None,
    }
    with connected(server, model) as client:
        result = sweep(client, request)
    for document, name in zip(result.documents, names, strict=False):
        document.name = name
    _print(result, as_json, as_csv)
    for path in plots or []:
        save_plot(result, path)
        stderr.print(f"saved {path}", markup=False, soft_wrap=True)


def sweep(client: Ropeway, request: dict[str, Any]) -> PerplexityResult:
    """Run one ``POST /perplexity`` with a progress bar.

    Raises:
        RopewayError: when the server answers with an error.
    """
    columns = (
        *(SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn()),
        *(TextColumn("{task.percentage:3.0f} %"), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()),
    )
    with Progress(*columns, console=stderr, transient=True) as progress:
        task = progress.add_task("waiting", total=None)

        def show(scored: Scored) -> None:
            done, total = scored.tokens_done, scored.tokens_total
            progress.update(task, completed=done, total=total, description=scored.label)

        return client.perplexity(**request, on_progress=show)


def print_table(result: PerplexityResult) -> None:
    """What was measured, then the numbers."""
    from service.evaluation.perplexity.tables import heading, perplexity_rich

    stdout.print(Text(printable(heading(result)), style="bold"))
    stdout.print(perplexity_rich(result))


def check_plot(path: Path) -> None:
    """Refuse a picture that could not be saved, before any work is done.

    Raises:
        typer.BadParameter: for another ending or a folder that does not exist.
    """
    if path.suffix.lower() not in (".png", ".html"):
        raise typer.BadParameter(f"{str(path)!r} must end in .png or .html", param_hint="--plot")
    if not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {str(path.parent)!r}", param_hint="--plot")


def save_plot(result: PerplexityResult, path: Path) -> None:
    """Write the curve as PNG or HTML, by the file's ending."""
    from service.figures.perplexity import perplexity_html, perplexity_png

    if path.suffix.lower() == ".png":
        path.write_bytes(perplexity_png(result))
    else:
        path.write_text(perplexity_html(result), encoding="utf-8")


def documents(files: list[str]) -> tuple[list[str], str | list[str] | None]:
    """(names, the request's input): one text or several; a built-in document goes by its name."""
    from service.evaluation.documents import BUILT_IN

    if not files or (files[0] in BUILT_IN and len(files) == 1 and not Path(files[0]).exists()):
        return [], files[0] if files else None
    texts = []
    for file in files:
        try:
            texts.append(sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8"))
        except OSError as error:
            fail(f"{file}: {error.strerror}")
        except UnicodeDecodeError:
            fail(f"{file}: not UTF-8 text")
    names = ["stdin" if file == "-" else Path(file).name for file in files]
    return names, texts[0] if len(texts) == 1 else texts


def _print(result: PerplexityResult, as_json: bool, as_csv: bool) -> None:
    from service.evaluation.tables import csv_of

    if as_json:
        typer.echo(result.model_dump_json(indent=2))
    elif as_csv:
        typer.echo(csv_of(result), nl=False)
    else:
        print_table(result)
