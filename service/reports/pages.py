"""What an HTML page of ours may do, as its Content-Security-Policy."""

from __future__ import annotations

import base64
import hashlib
from functools import cache

from service.figures.web.page import scripts


@cache
def policy_of(standalone: bool) -> str:
    """No script runs but those that draw figures, by their hashes, and nobody may frame the page.

    A ``standalone`` page has them inside; another one loads Plotly's from the server that it came from. Styles stay
    open because Plotly writes them into the page as it draws.
    """
    digests = [hashlib.sha256(script.encode()).digest() for script in scripts(standalone)]
    allowed = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
    if not standalone:
        allowed.insert(0, "'self'")
    return (
        f"default-src 'none'; script-src {' '.join(allowed)}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
