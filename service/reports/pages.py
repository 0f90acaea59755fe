"""What an HTML page of ours may do, as its Content-Security-Policy."""

from __future__ import annotations

import base64
import hashlib
import re


def policy_of(html: str) -> str:
    """The page's own scripts may run, by their hashes, and no others; nothing is loaded and nobody may frame it.
    Styles stay open because Plotly writes them into the page as it draws."""
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", html, re.DOTALL)
    hashes = {base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts}
    allowed = " ".join(f"'sha256-{value}'" for value in sorted(hashes)) or "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
