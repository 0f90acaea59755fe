"""HTML pages with a policy that fits them."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from typing import Annotated

from fastapi import Query
from fastapi.responses import Response

from service.figures.web.page import PLOTLY_FROM_A_PAGE, scripts

Standalone = Annotated[
    bool, Query(description="Everything in the page, so that it can be saved, mailed and opened without the server.")
]


def page(html: str, standalone: bool) -> Response:
    """An HTML answer in which no script runs but those that draw figures, and which nobody may frame.

    A ``standalone`` page has them inside; another one loads Plotly's from this server. Styles stay open because Plotly
    writes them into the page as it draws.
    """
    return Response(html, media_type="text/html", headers={"Content-Security-Policy": policy(standalone)})


@cache
def policy(standalone: bool) -> str:
    """The Content-Security-Policy of a page with figures."""
    digests = [hashlib.sha256(script.encode()).digest() for script in scripts(standalone)]
    allowed = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
    if not standalone:
        allowed.insert(0, "'self'")
    return (
        f"default-src 'none'; script-src {' '.join(allowed)}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def plotly_for(standalone: bool) -> str | None:
    """The address of Plotly's script for a page two levels deep; None for a page that has it inside."""
    return None if standalone else PLOTLY_FROM_A_PAGE
