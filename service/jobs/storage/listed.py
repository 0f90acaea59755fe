"""The request of a job in listings: it may have megabytes of documents."""

from __future__ import annotations

from typing import Any

from service.jobs.database.tables import written

LISTED_REQUEST = 1 << 14
"""Characters up to which listings show a request whole."""


def listed(body: dict[str, Any]) -> dict[str, Any]:
    """``body`` without its documents. Empty where it is long without them too."""
    found = _without_documents(body)
    return found if len(written(found)) <= LISTED_REQUEST else {}


def _without_documents(body: dict[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in body.items() if name not in ("input", "names")}
    if "evaluations" in found:  # the parts of a sweep
        found["evaluations"] = [_without_documents(part) for part in found["evaluations"]]
    return found
