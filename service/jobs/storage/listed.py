"""The request of a job in listings: it may have megabytes of documents."""

from __future__ import annotations

from typing import Any

from service.jobs.database.tables import written

LISTED_REQUEST = 1 << 14
"""Characters up to which listings show a request whole."""


def listed(body: dict[str, Any]) -> dict[str, Any]:
    """``body`` without its documents, and without their names where these make it long. Empty where it still is."""
    for fields in (("input",), ("input", "names")):
        found = _without(body, fields)
        if len(written(found)) <= LISTED_REQUEST:
            return found
    return {}


def _without(body: dict[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    found = {name: value for name, value in body.items() if name not in fields}
    if "evaluations" in found:  # the parts of a sweep
        found["evaluations"] = [_without(part, fields) for part in found["evaluations"]]
    return found
