"""Content-Security-Policy of our HTML pages."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable


def policy(scripts: Iterable[str], *, scripts_of_server: bool = False, asks_server: bool = False) -> str:
    """Only the given inline ``scripts`` may run, by their hashes, and no page may frame this one.

    With ``scripts_of_server`` this server's scripts may run too. With ``asks_server`` the page may send it requests and
    load its styles and pictures. Inline styles stay open: Plotly writes them while it draws.
    """
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    hashes = sorted({f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests})
    allowed = " ".join([*(["'self'"] if scripts_of_server else []), *hashes]) or "'none'"
    own, asks = (" 'self'", "'self'") if asks_server else ("", "'none'")
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'{own}; img-src data: blob:{own}; "
        f"connect-src {asks}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
