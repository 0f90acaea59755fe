"""Options of several commands, and the parsing of their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pydantic import BaseModel


def method_names(incomplete: str) -> list[str]:
    """Methods that start with ``incomplete``, for shell completion."""
    from patches import METHODS

    return [name for name in ("auto", *METHODS) if name.startswith(incomplete)]


KEY = "Its API key is in ROPEWAY_API_KEY."
Server = Annotated[
    str | None, typer.Option(metavar="URL", help=f"Use this server; without it, the command starts one. {KEY}")
]
ModelName = Annotated[
    str | None,
    typer.Option(
        help="With --server a served model's name, else the model to load: an id or a folder.",
        show_default="ROPEWAY_MODEL, or demo",
    ),
]


AsJson = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]


def encodings_option(default: str) -> Any:
    """The type of ``--pe``, with the words for its default."""
    option = typer.Option(
        "--pe",
        "--method",
        metavar="ENCODING",
        help="yarn:4, yarn:factor=4,truncate=false, auto, JSON; repeatable.",
        show_default=default,
        autocompletion=method_names,
    )
    return Annotated[list[str] | None, option]


if TYPE_CHECKING:
    Encodings = list[str] | None
else:
    Encodings = encodings_option("default")


def encodings(texts: list[str] | None, *, check: bool = True, option: str = "--pe") -> list[dict[str, Any]] | None:
    """Request fields of every encoding; None without any. ``option`` is where they were given.

    ``check`` finds mistakes before a model is loaded. It is off for ``--server``, which may have other methods.

    Raises:
        typer.BadParameter: naming the error in the first invalid encoding.
    """
    if not texts:
        return None
    from patches import from_text, in_words
    from service.policy.auto import auto_fields, is_auto, parse_encoding

    several = []
    for text in texts:
        try:
            fields = auto_fields(text) if is_auto(text) else from_text(text)
            if check:
                parse_encoding(fields)
        except ValueError as error:
            raise typer.BadParameter(f"{text}: {in_words(error)}", param_hint=option) from None
        several.append(fields)
    return several


def different(texts: list[str] | None, several: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """``several``, the request fields of ``texts``.

    Raises:
        typer.BadParameter: when two of them are the same encoding.
    """
    for index, fields in enumerate(several or []):
        if texts and several and fields in several[:index]:
            first = texts[several.index(fields)]
            same = "is named twice" if first == texts[index] else f"is the same encoding as {first}"
            raise typer.BadParameter(f"{texts[index]} {same}: name each one once", param_hint="--pe")
    return several


def check_body(kind: type[BaseModel], body: Mapping[str, Any]) -> None:
    """Refuse an invalid body before a model is loaded for it.

    Raises:
        typer.BadParameter: with the server's message.
    """
    from pydantic import ValidationError

    try:
        kind.model_validate({name: value for name, value in body.items() if value is not None})
    except ValidationError as error:
        from service.api.validation import problems_in, validation_error

        raise typer.BadParameter(validation_error(problems_in(error.errors())).message) from None


def lengths(text: str | None) -> list[int] | dict[str, int] | None:
    """``256,512`` as a list, ``256:4096:256`` as the request's start, stop and step.

    Raises:
        typer.BadParameter: for anything else.
    """
    if text is None:
        return None
    try:
        if ":" in text:
            start, stop, step = map(int, text.split(":"))
            return {"start": start, "stop": stop, "step": step}
        return [int(length) for length in text.split(",")]
    except ValueError:
        hint = f"{text!r} is neither a list like 256,512,1024 nor a range start:stop:step like 256:4096:256"
        raise typer.BadParameter(hint, param_hint="--lengths") from None
