"""What an HTML page of ours may do, as its Content-Security-Policy."""

from __future__ import annotations

import base64
import hashlib
import re


def policy_of(html: str, *, same_origin: bool = False) -> str:
    """The page's own scripts may run, by their hashes, and no others; nothing is loaded and nobody may frame it.
    Styles stay open because Plotly writes them into the page as it draws.

    With ``same_origin`` it may load from this server and ask it, and no other.
    """
    scripts = filter(None, re.findall(r"<script[^>]*>(.*?)</script>", html, re.DOTALL))
    hashes = {base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts}
    allowed = " ".join(f"'sha256-{value}'" for value in sorted(hashes)) or "'none'"
    own, asks = (" 'self'", "'self'") if same_origin else ("", "'none'")
    return (
        f"default-src 'none'; script-src {allowed}{own}; style-src 'unsafe-inline'{own}; img-src data: blob:{own}; "
        f"connect-src {asks}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
