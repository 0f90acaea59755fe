"""Made-up answers of a server: functions of the request, streams, and their events."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx

Answer = Callable[[httpx.Request], httpx.Response]


def events(*items: tuple[str, Any]) -> httpx.Response:
    """A server-sent event stream; unnamed events have the name ''."""
    blocks = [
        (f"event: {name}\n" if name else "") + f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
        for name, data in items
    ]
    return streamed("".join([": ping\n\n", *blocks, "data: [DONE]\n\n"]).encode())


def streamed(content: bytes) -> httpx.Response:
    return httpx.Response(200, headers={"Content-Type": "text/event-stream; charset=utf-8"}, content=content)
