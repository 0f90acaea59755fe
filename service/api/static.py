"""Plotly's script for the pages of this server. Browsers keep it, and it is open: a page cannot send a key for it."""

from __future__ import annotations

import gzip
import threading
from functools import cache

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response

from service.api.files import unpacked_response
from service.errors import ApiError

router = APIRouter(include_in_schema=False)

HEADERS = {"Cache-Control": "public, max-age=31536000, immutable"}
"""Another version of Plotly has another path."""


@router.get("/static/plotly-{version}.min.js")
async def plotly(version: str, request: Request) -> Response:
    """The script, packed for browsers that take that."""
    ours, packed = await run_in_threadpool(packed_script)
    if version != ours:
        raise ApiError(404, f"this server has version {ours} of Plotly's script", code="not_found")
    return unpacked_response(packed, "text/javascript", request, HEADERS)


_packing = threading.Lock()


def packed_script() -> tuple[str, bytes]:
    """Plotly's version and its script, packed once for all requests."""
    with _packing:
        return _packed()


@cache
def _packed() -> tuple[str, bytes]:
    from plotly.offline import get_plotlyjs, get_plotlyjs_version  # a start does not wait for it

    return get_plotlyjs_version(), gzip.compress(get_plotlyjs().encode(), 6, mtime=0)
