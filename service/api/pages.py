"""HTML pages with a policy that fits them."""

from __future__ import annotations

import base64
import hashlib
import re

from fastapi.responses import Response


def page(html: str, *, same_origin: bool = False) -> Response:
    """An HTML answer whose own scripts may run, by their hashes, and no others; nothing is loaded and nobody may
    frame it. Styles stay open because Plotly writes them into the page as it draws.

    With ``same_origin`` it may load and ask this server, and no other.
    """
    scripts = filter(None, re.findall(r"<script[^>]*>(.*?)</script>", html, re.DOTALL))
    hashes = {base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts}
    allowed = " ".join(f"'sha256-{value}'" for value in sorted(hashes)) or "'none'"
    own, asks = (" 'self'", "'self'") if same_origin else ("", "'none'")
    policy = (
        f"default-src 'none'; script-src {allowed}{own}; style-src 'unsafe-inline'{own}; img-src data: blob:{own}; "
        f"connect-src {asks}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Response(html, media_type="text/html", headers={"Content-Security-Policy": policy})
