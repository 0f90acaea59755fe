"""Plotly's script for the pages of this server: kept by browsers, and open, since a page cannot send a key for it."""

from __future__ import annotations

import gzip
from functools import cache

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response
from plotly.offline import get_plotlyjs

from service.api.files import unpacked_response
from service.figures.web.page import PLOTLY_PATH

router = APIRouter(include_in_schema=False)

HEADERS = {"Cache-Control": "public, max-age=31536000, immutable"}
"""Another version of Plotly has another path."""


@router.get(PLOTLY_PATH)
async def plotly(request: Request) -> Response:
    """The script, packed for browsers that take that."""
    return unpacked_response(await run_in_threadpool(_packed), "text/javascript", request, HEADERS)


@cache
def _packed() -> bytes:
    return gzip.compress(get_plotlyjs().encode(), 6, mtime=0)
