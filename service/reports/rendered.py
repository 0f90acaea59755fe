"""A rendered file, and the options of a page."""

from __future__ import annotations

import gzip
from typing import NamedTuple


class Rendered(NamedTuple):
    """A file: ``data`` is packed with gzip where that makes it smaller, ``policy`` is a page's. ``refusal``: there is
    no such file, and why; ``refused_field`` is the field at fault."""

    data: bytes
    media_type: str
    packed: bool
    policy: str | None = None
    refusal: str | None = None
    refused_field: str = ""


def packed_text(text: str, media_type: str, policy: str | None = None) -> Rendered:
    """``text`` under gzip."""
    return Rendered(gzip.compress(text.encode(), 5, mtime=0), media_type, True, policy)


def refused(field: str, why: str) -> Rendered:
    """No file, because of a field."""
    return Rendered(b"", "", False, refusal=why, refused_field=field)


class PageOptions(NamedTuple):
    """``standalone`` pages contain Plotly's script; reports contain the sent texts with ``include_text``. ``picture``
    names another picture than the main one."""

    standalone: bool = False
    include_text: bool = False
    picture: str | None = None


PAGE = PageOptions()
"""A page of the server."""
