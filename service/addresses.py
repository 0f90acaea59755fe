"""Settings that are addresses: refused at start with the form they should have."""

from __future__ import annotations

from urllib.parse import urlsplit


def http_url(text: str) -> str:
    """``text``, if it is the URL of a host.

    Raises:
        ValueError: for anything else. The text may hold a password, so the message has none of it.
    """
    try:
        parts = urlsplit(text)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # whose message may have a part of the password
        is_url = False
    if not is_url:
        raise ValueError("http://HOST:PORT or https://HOST:PORT, where the port is a number below 65536")
    return text
