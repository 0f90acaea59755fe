"""Options that several commands share, and reading what they are given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pydantic import BaseModel


def method_names(incomplete: str) -> list[str]:
    """The methods that begin like this, for a shell that completes."""
    from patches import METHODS

    return [name for name in METHODS if name.startswith(incomplete)]


Server = Annotated[
    str | None, typer.Option(metavar="URL", help="Ask this server; without it one is started for this command.")
]
ModelName = Annotated[
    str | None,
    typer.Option(
        help="With --server a served model's name, else the model to load: an id or a folder.",
        show_default="ROPEWAY_MODEL, or demo",
    ),
]
Encodings = Annotated[
    list[str] | None,
    typer.Option(
        "--pe",
        "--method",
        metavar="ENCODING",
        help="yarn:4, yarn:factor=4,truncate=false, JSON; repeatable.",
        show_default="default",
        autocompletion=method_names,
    ),
]


def encodings(texts: list[str] | None, *, check: bool = True) -> list[dict[str, Any]] | None:
    """Request fields of every encoding, None where none was given.

    ``check`` finds mistakes before a model is loaded; another server may know more than this one.

    Raises:
        typer.BadParameter: naming what is wrong with the first one that cannot be used.
    """
    if not texts:
        return None
    from patches import from_text, parse

    several = []
    for text in texts:
        try:
            fields = from_text(text)
            if check:
                parse(fields)
        except ValueError as error:
            raise typer.BadParameter(f"{text}: {error}", param_hint="--pe") from None
        several.append(fields)
    return several


def check_body(kind: type[BaseModel], body: Mapping[str, Any]) -> None:
    """Refuse a body that no server would take, before a model is loaded for it.

    Raises:
        typer.BadParameter: in the words in which a server refuses it.
    """
    from pydantic import ValidationError

    try:
        kind.model_validate({name: value for name, value in body.items() if value is not None})
    except ValidationError as error:
        from fastapi.exceptions import RequestValidationError

        from service.api.errors import as_api_error

        raise typer.BadParameter(as_api_error(RequestValidationError(error.errors())).message) from None


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
