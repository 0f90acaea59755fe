"""``ropeway export``: an encoding in the syntax of another system."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from service.cli.shared.client import connected
from service.cli.shared.options import AsJson, ModelName, Server, encodings, method_names
from service.cli.shared.terminal import stderr

if TYPE_CHECKING:
    from service.api.response_models.encodings import ExportResult


def target_names(incomplete: str) -> list[str]:
    """Systems that start with ``incomplete``, for shell completion."""
    from service.export.targets import TARGETS

    return [name for name in TARGETS if name.startswith(incomplete)]


def export(
    pe: Annotated[str, typer.Argument(metavar="ENCODING", help="yarn:4, or JSON.", autocompletion=method_names)],
    target: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="SYSTEM",
            help="transformers, vllm, sglang, llama.cpp, exllamav3 or tgi.",
            autocompletion=target_names,
        ),
    ],
    length: Annotated[
        int | None,
        typer.Option(min=2, help="Longest text in tokens.", show_default="the length that the parameters reach"),
    ] = None,
    model: ModelName = None,
    as_json: AsJson = False,
    server: Server = None,
) -> None:
    """Print ENCODING as configuration and options of another system."""
    (fields,) = encodings([pe], check=server is None, option="ENCODING") or []
    if server is None:
        _check_target(target)
    with connected(server, model) as client:
        result = client.export(fields, target, length=length, model=model if server else None)
    if server is None:
        result = _of_the_files(result, model)
    if as_json:
        typer.echo(result.model_dump_json(indent=2))
        return
    system = f"{result.target} {result.version}"
    if not result.changes:
        notes = [f"The checkpoint's own encoding: {system} needs no option for it, only the length."]
    else:
        notes = [f"{result.pe['method']} on {result.model}, up to {result.length} tokens, for {system}. {result.apply}"]
    if json.dumps(result.config) not in result.arguments and result.config:
        typer.echo(json.dumps(result.config, indent=2))
    typer.echo(result.usage)
    for line in [*notes, *result.notes, *result.differences, f"Options: {result.documentation}"]:
        stderr.print(Text(line, style="dim"), soft_wrap=True)


def _of_the_files(result: ExportResult, model: str | None) -> ExportResult:
    """``result`` whose line has the folder or the id of the model, not the name under which it was served."""
    from service.cli.server import settings_with
    from service.export.target import Expression
    from service.export.targets import TARGETS
    from service.models.checkpoint.loading import sources

    source = sources(settings_with(model=model)).get(result.model, result.model)
    made = Expression(result.config, result.arguments, result.differences)
    return result.model_copy(update={"usage": TARGETS[result.target].usage(str(source), made)})


def _check_target(target: str) -> None:
    """Refuse an unknown system before a model is loaded.

    Raises:
        typer.BadParameter: naming the systems.
    """
    from patches import unknown
    from service.export.targets import TARGETS

    if target not in TARGETS:
        raise typer.BadParameter(unknown("target", target, TARGETS), param_hint="--to")
