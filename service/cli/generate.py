"""``ropeway generate``: one prompt, one or several encodings, streamed text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from service.cli.shared.client import connected
from service.cli.shared.files import as_utf_8, decoded
from service.cli.shared.options import Encodings, ModelName, Server, check_body, encodings
from service.cli.shared.terminal import stderr, stdout
from service.evaluation.formatting import printable

if TYPE_CHECKING:
    from service.client import ResultEnd, Ropeway

PANEL_WIDTH = 38


def generate(  # noqa: PLR0913 - one argument per option
    prompt: Annotated[str, typer.Argument(help="The text to continue; '-' reads it from stdin.")],
    pe: Encodings = None,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", "-n", min=1, help="Most new tokens.", show_default="64")
    ] = None,
    min_tokens: Annotated[int | None, typer.Option(min=0, help="Fewest new tokens.", show_default="0")] = None,
    ignore_eos: Annotated[
        bool | None, typer.Option("--ignore-eos", help="Continue after end-of-text tokens.", show_default=False)
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=100, help="0 is greedy.", show_default="0")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Keep the most likely tokens up to this probability.", show_default="1"),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=0, help="Keep this many of the most likely tokens; 0 keeps all.", show_default="0")
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Keep tokens with this share of the largest probability.", show_default="0"),
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(min=0.01, max=100, help="Above 1: fewer tokens come again.", show_default="1")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=-(1 << 63), help="The same seed gives the same text, up to rounding.", show_default="random"),
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End at this text; repeatable.")] = None,
    regex: Annotated[str | None, typer.Option(help="The answer matches this regular expression.")] = None,
    choice: Annotated[list[str] | None, typer.Option(help="The answer is this text; repeatable.")] = None,
    schema: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="The answer is JSON by the JSON schema in this file."),
    ] = None,
    model: ModelName = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole answer as JSON, at the end.")] = False,
    server: Server = None,
) -> None:
    """Continue PROMPT. Several --pe answer it under each encoding, side by side."""
    methods = encodings(pe, check=server is None)
    given = {
        "prompt": decoded(sys.stdin.buffer.read(), "stdin").removesuffix("\n") if prompt == "-" else prompt,
        "pe": methods,
        "model": model if server else None,
        "max_new_tokens": max_new_tokens,
        "min_tokens": min_tokens,
        "ignore_eos": ignore_eos,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stop": stop or None,
        "structured_outputs": _structured(regex=regex, choice=choice, schema=schema),
    }
    request: dict[str, Any] = as_utf_8(given)

    def check() -> None:
        from service.api.generation.generate import GenerateRequest

        check_body(GenerateRequest, request)

    with connected(server, model, check) as client:
        if as_json:
            typer.echo(client.generate(**request).model_dump_json(indent=2))
        elif len(methods or []) > 1:
            _side_by_side(client, request, pe or [])
        else:
            _one(client, request)


def _structured(*, regex: str | None, choice: list[str] | None, schema: Path | None) -> dict[str, Any] | None:
    """The form of the answer."""
    json = None if schema is None else decoded(schema.read_bytes(), str(schema))
    given = {"regex": regex, "choice": choice or None, "json": json}
    return {name: value for name, value in given.items() if value is not None} or None


def _one(client: Ropeway, request: dict[str, Any]) -> None:
    """Stream the text to stdout; print its encoding and timings to stderr."""
    from service.client import ResultEnd, TextDelta

    shown = printable if stdout.is_terminal else str
    for event in client.stream(**request):
        if isinstance(event, TextDelta):
            sys.stdout.write(shown(event.text))
            sys.stdout.flush()
        elif isinstance(event, ResultEnd):
            sys.stdout.write("\n")
            sys.stdout.flush()
            stderr.print(Text(resolved_line(event), style="dim"))


def _side_by_side(client: Ropeway, request: dict[str, Any], titles: list[str]) -> None:
    from service.client import ResultEnd, TextDelta

    texts, ends = [""] * len(titles), [""] * len(titles)

    def columns() -> Table:
        return panels(list(zip(titles, texts, ends, strict=True)))

    with Live(get_renderable=columns, console=stdout, transient=True, vertical_overflow="ellipsis"):
        for event in client.stream(**request):
            if isinstance(event, TextDelta):
                texts[event.index] += event.text
            elif isinstance(event, ResultEnd):
                ends[event.index] = resolved_line(event)
    stdout.print(columns())


def panels(answers: list[tuple[str, str, str]]) -> Table:
    """(name, text, note) side by side, as many in a row as the terminal's width allows."""
    per_row = max(1, min(len(answers), stdout.width // PANEL_WIDTH))
    grid = Table.grid(expand=True)
    for _ in range(per_row):
        grid.add_column(ratio=1)
    boxes = [
        Panel(
            Group(Text(printable(text), overflow="fold"), Text(note, style="dim")),
            title=Text(name, style="bold"),
            title_align="left",
        )
        for name, text, note in answers
    ]
    for first in range(0, len(boxes), per_row):
        grid.add_row(*boxes[first : first + per_row])
    return grid


def resolved_line(result: ResultEnd) -> str:
    """The resolved encoding and the speed of a result, in one line."""
    pe, usage, auto = result.pe, result.usage, result.auto
    facts = [f"{pe['method']} on {result.model}", f"keys rotated: {pe['rotates_at'].replace('_', ' ')}"]
    if auto is not None:
        lengths = f"above {auto.above:,}" if auto.up_to is None else f"{auto.above + 1:,} to {auto.up_to:,}"
        facts.append(f"auto by {auto.source}: {lengths} tokens")
    if pe["effective_rope_theta"]:
        facts.append(f"theta {pe['effective_rope_theta']:,.0f}")
    if pe["attention_factor"] != 1:
        facts.append(f"attention factor {pe['attention_factor']:.4g}")
    facts.append(f"hash {pe['frequency_hash']}")
    facts.append(f"{usage.prompt_tokens} + {usage.completion_tokens} tokens, {result.finish_reason}")
    if result.timings.decode_s > 0 and usage.completion_tokens > 1:
        facts.append(f"{(usage.completion_tokens - 1) / result.timings.decode_s:.0f} tokens/s")
    return " · ".join(facts)
