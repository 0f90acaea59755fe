"""One command per evaluation of the catalogue, with an option for every field of its body."""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from service.cli.shared.budget import MINUTES, minutes_of, submitted
from service.cli.shared.client import connected
from service.cli.shared.commands import twice
from service.cli.shared.files import check_outputs, save, save_pictures
from service.cli.shared.following import finding_again, finish
from service.cli.shared.measuring import (
    AsCsv,
    Files,
    LengthList,
    MaxTokens,
    PictureName,
    Plots,
    body_of,
    refuse_without_effect,
    show,
)
from service.cli.shared.options import AsJson, Encodings, ModelName, Server, encodings_option
from service.cli.shared.terminal import new_table, print_table, stdout
from service.evaluation.catalogue import EVALUATIONS, OPTION, Evaluation

IncludeText = Annotated[
    bool,
    typer.Option(
        "--include-text", help="A report has the texts, not only lengths and hashes; it and --json have the prompts."
    ),
]

SHARED = {
    *("evaluation", "model", "methods", "lengths", "input", "names", "max_tokens"),
    *("stream", "background", "timeout_s"),
}
"""Fields with a shared option, or with none."""


def separated(
    items: Sequence[str], fields: Mapping[str, Any], shared: Sequence[str] = ()
) -> tuple[list[str], dict[str, Any]]:
    """(files, values of the evaluation's fields) from the arguments that the options ``shared`` left over.

    A field is ``--name value`` or ``--name=value``; a repeated list goes on. A boolean one is ``--name`` or
    ``--no-name``.

    Raises:
        typer.BadParameter: for an unknown name, or a missing, needless or second value.
    """
    files: list[str] = []
    values: dict[str, Any] = {}
    renamed = {schema[OPTION]: field for field, schema in fields.items() if OPTION in schema}
    rest = iter(items)
    for item in rest:
        if item == "-" or not item.startswith("-"):
            files.append(item)
            continue
        if not item.startswith("--"):
            raise _unknown(item, [*fields, *renamed], shared)
        flag, equals, text = item[2:].partition("=")
        name = renamed.get(flag, flag.replace("-", "_"))
        switched = name.removeprefix("no_")
        if switched in fields and fields[switched].get("type") == "boolean":
            if equals:
                raise typer.BadParameter(
                    f"--{flag} takes no value: it is --{_option(switched)} or --no-{_option(switched)}"
                )
            values[switched] = switched == name
            continue
        if name not in fields:
            raise _unknown(item, [*fields, *renamed], shared)
        given = text if equals else next(rest, None)
        if given is None:
            raise typer.BadParameter(f"--{flag} needs a value")
        value = value_of(given)
        if _is_list(fields[name]):
            values[name] = [*values.get(name, []), *(value if isinstance(value, list) else [value])]
        elif name in values:
            raise twice(f"--{flag}")
        else:
            values[name] = value
    return files, values


def _unknown(item: str, fields: Iterable[str], shared: Iterable[str]) -> typer.BadParameter:
    """The refusal of what looks like an option, with the nearest one."""
    given = item.partition("=")[0]
    close = difflib.get_close_matches(given.strip("-"), [*map(_option, fields), *shared])
    guess = f"did you mean --{close[0]}?" if close else "--help and --fields list what there is"
    return typer.BadParameter(f"no option {given}: {guess}")


def _option(field: str) -> str:
    return field.replace("_", "-")


def _is_list(schema: Mapping[str, Any]) -> bool:
    kinds = [kind.get("type") for kind in schema.get("anyOf", [schema])]
    return "array" in kinds and set(kinds) <= {"array", "null"}


def check_include_text(evaluation: str, *, as_json: bool) -> None:
    """Refuse --include-text without a report where it has no effect.

    Raises:
        typer.BadParameter: naming what it needs.
    """
    if not EVALUATIONS[evaluation].request.writes_prompts:
        raise typer.BadParameter(f"--include-text needs a report: {evaluation} writes no prompts that JSON could have")
    if not as_json:
        raise typer.BadParameter("--include-text needs a report or JSON: add --report or --json")


def own_fields(name: str) -> dict[str, Any]:
    """JSON schemas of the fields of an evaluation's body that no shared option sets, by name; ``minutes`` for a
    ``budget``, and for a sweep how its parts read documents."""
    own = {field: schema for field, schema in _schema(name)["properties"].items() if field not in SHARED}
    if "evaluations" in own:
        own["short_documents"] = _schema("perplexity")["properties"]["short_documents"]
    return own | {"minutes": MINUTES} if "budget" in own else own


@cache
def _schema(name: str) -> dict[str, Any]:
    return EVALUATIONS[name].request.model_json_schema()


def print_fields(name: str) -> None:
    """A table of the options that an evaluation adds."""
    from service.reports.schema import field_rows

    table = new_table("option", "value", "default", "meaning")
    definitions = _schema(name).get("$defs", {})
    for field, schema in own_fields(name).items():
        option = schema.get(OPTION, _option(field))
        rows = field_rows(f"--{option}", schema, definitions)
        if schema.get("type") == "boolean":
            default = f"--{option}" if schema["default"] else f"--no-{option}"
            rows = [(f"--{option} / --no-{option}", "", default, schema["description"])]
        for row in rows:
            table.add_row(*map(Text, row))
    table.caption = "An object is one argument of JSON, with the fields that are indented below it."
    print_table(table)


def value_of(text: str) -> Any:
    """An option's value: JSON, a list with commas, or the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return [value_of(item) for item in text.split(",")] if "," in text and '"' not in text else text


def add_command(evaluation: Evaluation, app: typer.Typer) -> None:
    """Add ``ropeway NAME`` to ``app``."""
    name = evaluation.name
    help_text = f"{evaluation.summary}\n\nEvery other field of the request is an option too: --fields lists them."

    def run(  # noqa: PLR0913 - one argument per option
        context: typer.Context,
        files: Files = None,
        pe: Encodings = None,
        lengths_: LengthList = None,
        max_tokens: MaxTokens = None,
        model: ModelName = None,
        plots: Plots = None,
        picture_name: PictureName = None,
        report: Annotated[Path | None, typer.Option(metavar="FILE", help="Save a report as one HTML file.")] = None,
        include_text: IncludeText = False,
        policy: Annotated[
            Path | None,
            typer.Option("--policy", metavar="FILE", help="Save the encodings by length: a file for `ropeway serve`."),
        ] = None,
        as_json: AsJson = False,
        as_csv: AsCsv = False,
        cancel: Annotated[bool, typer.Option("--cancel", help="With --server: Ctrl-C cancels the job.")] = False,
        background: Annotated[
            bool, typer.Option("--background", help="With --server: print the job's id and leave.")
        ] = False,
        fields: Annotated[bool, typer.Option("--fields", help="List the options of this evaluation alone.")] = False,
        server: Server = None,
    ) -> None:
        if fields:
            print_fields(name)
            return
        check_outputs(plots, picture_name, report, policy, as_json=as_json, as_csv=as_csv)
        outputs = {"json": as_json, "csv": as_csv, "plot": plots, "report": report, "policy": policy}
        refuse_without_effect(server, background=background, cancel=cancel, **outputs)
        if include_text and report is None:
            check_include_text(name, as_json=as_json)
        names = [option for parameter in context.command.params for option in parameter.opts]
        shared = [option.removeprefix("--") for option in names if option.startswith("--")]
        paths, own = separated(files or [], own_fields(name), shared)
        minutes = minutes_of(own)
        body = body_of(name, own, paths, pe, lengths_, max_tokens, model, server)
        with connected(server, model) as client:
            job = submitted(name, body, minutes, client)
            if background:
                stdout.print(job.id)
                return
            finish(client, job, server, cancel=cancel, as_json=as_json, as_csv=as_csv)
            with finding_again(job, server):
                with_prompts = include_text and as_json and evaluation.request.writes_prompts
                result = client.result(job.id, include_text=with_prompts)
                # Before the server stops: Ctrl-C may come while it does.
                show(result, as_json=as_json, as_csv=as_csv)
                if report is not None:
                    save(report, client.download(job.id, "report.html", include_text=include_text))
                if policy is not None and (made := result.policy(datetime.now(UTC))) is not None:
                    save(policy, made.model_dump_json(indent=2).encode())
                # Last: only the result shows which names there are.
                save_pictures(result, plots, picture_name)

    _fit_options(run, evaluation)
    options: dict[str, Any] = {"help": help_text, "context_settings": {"ignore_unknown_options": True}}
    command = name.replace("_", "-")
    app.command(command, **options)(run)
    if command != name:  # its name in the API
        app.command(name, hidden=True, **options)(run)


def _fit_options(run: Callable[..., None], evaluation: Evaluation) -> None:
    """An evaluation that chooses encodings proposes them itself; any other one has no choice to save."""
    signature = inspect.signature(run, eval_str=True)
    options = dict(signature.parameters)
    if evaluation.proposes:
        options["pe"] = options["pe"].replace(annotation=encodings_option(evaluation.proposes))
    if not evaluation.chooses:
        del options["policy"]
    run.__signature__ = signature.replace(parameters=list(options.values()))  # type: ignore[attr-defined] # typer reads it


def add_to(app: typer.Typer) -> None:
    """A command for every evaluation of the catalogue, in its order."""
    for evaluation in EVALUATIONS.values():
        add_command(evaluation, app)
