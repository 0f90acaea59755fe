"""Options that several commands share, and reading what they are given."""

from __future__ import annotations

from typing import Annotated, Any

import typer

Server = Annotated[
    str | None, typer.Option(metavar="URL", help="Ask this server; without it one is started for this command.")
]
ModelName = Annotated[
    str | None, typer.Option(help="With --server a served model's name, else the model to load: an id or a folder.")
]
Encodings = Annotated[
    list[str] | None,
    typer.Option(
        "--pe", "--method", metavar="ENCODING", help="yarn:4, yarn:factor=4,truncate=false, JSON; repeatable."
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
    from pydantic import ValidationError

    from patches import parse
    from service.shorthand import from_text

    several = []
    for text in texts:
        try:
            fields = from_text(text)
            if check:
                parse(fields)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"][-1:]))
            raise typer.BadParameter(f"{text}: {where}: {problem['msg']}", param_hint="--pe") from None
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--pe") from None
        several.append(fields)
    return several


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
