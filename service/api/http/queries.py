"""Query parameters: a route refuses those that it does not declare."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.dependencies.models import Dependant
from pydantic import BeforeValidator

from patches import problem, repeated, unknown
from service.errors import MAX_CHARS, bad_request


async def _all(request: Request) -> dict[str, str]:
    return dict(request.query_params)


def _of_digits(value: Any) -> Any:
    """pydantic reads ``1_0``, `` 5`` and ``5.0`` as numbers, too."""
    if isinstance(value, str) and re.fullmatch("-?[0-9]+", value) is None:
        raise problem("whole_number", "must be a whole number")
    return value


WholeNumber = Annotated[int, BeforeValidator(_of_digits)]
"""A query parameter that is written as JSON writes such numbers."""

AnyParameters = Annotated[dict[str, str], Depends(_all)]
"""All query parameters, for a route that takes any name and checks them itself."""


def declared(dependant: Dependant) -> dict[str, None] | None:
    """The names of a route's query parameters, in order; None if it takes any."""
    names = dict.fromkeys(field.alias for field in dependant.query_params)
    for inner in dependant.dependencies:
        within = declared(inner)
        if inner.call is _all or within is None:
            return None
        names |= within
    return names


def check_no_field(request: Request, fields: Collection[str]) -> None:
    """Raises:
    ApiError: for a query parameter with the name of one of the ``fields`` of the body, which would have no effect.
    """
    if name := next((name for name in request.query_params if name in fields), None):
        raise bad_request(f"{name} is a field of the body, and has no effect in the address", name, "invalid_request")


def check_query(request: Request, known: dict[str, None] | None) -> None:
    """Raises:
    ApiError: for a parameter that is given twice, and for one that is not ``known``, with the nearest or all names.
    """
    if not request.scope["query_string"]:
        return
    given = [name for name, _ in request.query_params.multi_items()]
    if len(request.query_params) < len(given):
        twice = repeated(given)
        message = f"the query parameter {twice[:MAX_CHARS]!r} is given twice"
        raise bad_request(message, twice, "invalid_request")
    if known is None:
        return
    wrong = next((name for name in request.query_params if name not in known), None)
    if wrong is None:
        return
    kind = "query parameter"
    message = unknown(kind, wrong, known) if known else f"unknown {kind} {wrong[:MAX_CHARS]!r}: this route takes none"
    raise bad_request(message, wrong, "invalid_request")
