"""Words for an invalid request: at most 10 problems, of 200 characters but for the first. The shell has the same ones,
so this module loads no heavy library."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from patches import ENCODING_TAGS, Problem, problems_of
from service.errors import MAX_CHARS, MAX_CHARS_OF_THE_FIRST, MAX_PROBLEMS, ApiError, bad_request
from service.evaluation.catalogue import EVALUATIONS
from service.inputs import TAGS

NO_FIELDS = frozenset({"body", "query", "path", "header", *TAGS, *ENCODING_TAGS, *EVALUATIONS})
"""Parts of a problem's location that FastAPI and unions add."""


def validation_error(problems: Sequence[Problem]) -> ApiError:
    """One message for all that is wrong with a request, the fields named."""
    first, *others = problems
    lines = [str(first)[:MAX_CHARS_OF_THE_FIRST], *(str(other)[:MAX_CHARS] for other in others[: MAX_PROBLEMS - 1])]
    if len(problems) > MAX_PROBLEMS:
        lines.append("and more")
    return bad_request("; ".join(lines), param=first.field[:MAX_CHARS] or None, code="invalid_request")


def problems_in(errors: Iterable[Any]) -> list[Problem]:
    """pydantic's errors about a request; errors of the whole body get the field ``body``."""
    found = problems_of(map(_of_a_field, errors), NO_FIELDS)
    return [problem if problem.field else Problem("body", problem.message) for problem in found]


def _of_a_field(error: Any) -> Any:
    """A field may have the name of its evaluation (`needle`): errors about a text are errors of a field."""
    *before, last = error["loc"] or ("",)
    if last not in EVALUATIONS or not error["type"].startswith(("missing", "string_")):
        return error
    return {**error, "loc": tuple(before), "ctx": {**error.get("ctx", {}), "field": last}}
