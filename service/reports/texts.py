"""A request's body with names, lengths and hashes in place of its documents."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from service.evaluation.documents import BUILT_IN, token_digest
from service.inputs import names_of


def without_texts(body: Mapping[str, Any]) -> dict[str, Any]:
    """``body`` with a description in place of every text and every list of token ids in ``input``.

    Names of built-in documents stay. The parts of a sweep are treated alike.
    """
    found = dict(body)
    if "evaluations" in found:
        found["evaluations"] = [without_texts(part) for part in found["evaluations"]]
    given, names = found.get("input"), found.pop("names", None)
    if isinstance(given, list) and not isinstance(given[0], int):
        found["input"] = [_described(*pair) for pair in zip(names_of(names, len(given)), given, strict=True)]
    elif given is not None:
        found["input"] = _described(names_of(names, 1)[0], given)
    return found


def _described(name: str, document: str | list[int]) -> str | dict[str, str | int]:
    """SHA-256 of a text is that of its UTF-8 bytes, as `sha256sum` prints it."""
    if not isinstance(document, str):
        return {"name": name, "tokens": len(document), "sha256": token_digest(document)}
    if document in BUILT_IN:
        return document
    encoded = document.encode(errors="surrogatepass")
    return {
        "name": name,
        "characters": len(document),
        "bytes": len(encoded),
        "sha256": hashlib.sha256(encoded).hexdigest(),
    }
