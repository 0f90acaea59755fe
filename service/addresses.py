"""Settings that are addresses or API keys, refused at start with the form they should have, and a free port."""

from __future__ import annotations

import re
import socket
from urllib.parse import urlsplit

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
"""An origin as browsers send it: no path, in lower case."""

API_KEY = re.compile(r"[!-~]+")
"""A key that every client can send in a header: other characters have no bytes there, or end it."""


def api_key(text: str) -> str:
    """``text`` without white space at its ends.

    Raises:
        ValueError: for a key that no header can have. The message has none of it.
    """
    key = text.strip()
    if not API_KEY.fullmatch(key):
        raise ValueError("an API key must be one or more printable ASCII characters without blanks")
    return key


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


def origins(items: tuple[str, ...]) -> tuple[str, ...]:
    """The origins in lower case, as browsers send them.

    Raises:
        ValueError: for an item that no browser sends, which would allow no page.
    """
    for item in items:
        if item != "*" and not ORIGIN.fullmatch(item.lower()):
            allowed = "scheme://HOST or scheme://HOST:PORT, without a path"
            raise ValueError(f"{item!r} is neither * nor an origin: {allowed}")
    return tuple(item.lower() for item in items)


def free_port(host: str = "127.0.0.1") -> int:
    """A port of ``host`` on which nothing listens."""
    with socket.create_server((host, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
