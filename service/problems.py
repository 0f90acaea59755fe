"""What is wrong with a request's body, query or headers, in plain words: the field, and what is allowed there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from patches import ENCODING_TAGS, Problem, problems_of
from service.evaluation.catalogue import EVALUATIONS
from service.inputs import TAGS

NO_FIELDS = frozenset({"body", "query", "path", "header", *TAGS, *ENCODING_TAGS, *EVALUATIONS})
"""What FastAPI and unions put into the location of a problem."""


def problems_in(errors: Iterable[Any]) -> list[Problem]:
    """pydantic's errors about a request. What is wrong with a whole body is wrong with the field ``body``."""
    found = problems_of(map(_in_the_body, errors), NO_FIELDS)
    return [problem if problem.field else Problem("body", problem.message) for problem in found]


def _in_the_body(error: Any) -> Any:
    """FastAPI gives broken JSON the offset for a field."""
    if error["type"] != "json_invalid":
        return error
    return {**error, "loc": (), "ctx": {"error": f"{error['ctx']['error']} at character {error['loc'][-1] + 1}"}}
