"""``/docs`` and ``/openapi.json``: the API for people, from files of this server alone.

Swagger UI comes from the package fastapi-swagger, of which only the files are used.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import NamedTuple

from fastapi import APIRouter, FastAPI, Request, Security
from fastapi.concurrency import run_in_threadpool
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.params import Depends
from fastapi.responses import Response
from fastapi.security import APIKeyHeader, HTTPBearer
from starlette.staticfiles import StaticFiles

from service.api.reference.openapi import arranged, in_brief
from service.reports.pages import policy

ASSETS = "docs/assets"
OF_THE_PAGE = "/docs/openapi.json"
"""The document that the page shows."""

KEYS: list[Depends] = [
    Security(
        HTTPBearer(scheme_name="bearer", description="An API key, where the server asks for one.", auto_error=False)
    ),
    Security(APIKeyHeader(scheme_name="x-api-key", name="x-api-key", description="The same key.", auto_error=False)),
]
"""Two ways to send a key, for the document only: ``AccessControl`` checks the key before any route."""

router = APIRouter(include_in_schema=False)


@router.get("/docs")
async def docs() -> Response:
    html = get_swagger_ui_html(
        openapi_url=OF_THE_PAGE.lstrip("/"),
        title="Ropeway",
        swagger_js_url=f"{ASSETS}/swagger-ui-bundle.js",
        swagger_css_url=f"{ASSETS}/swagger-ui.css",
        swagger_favicon_url=f"{ASSETS}/favicon-32x32.png",
        swagger_ui_parameters={"defaultModelsExpandDepth": 0, "displayRequestDuration": True, "validatorUrl": None},
    )
    text = bytes(html.body).decode().replace("<html>", '<html lang="en">')
    inside = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    allowed = policy(inside, scripts_of_server=True, asks_server=True)
    return Response(text, media_type="text/html", headers={"Content-Security-Policy": allowed})


@router.get("/openapi.json")
async def document(request: Request) -> Response:
    return Response((await _documents(request)).whole, media_type="application/json")


@router.get(OF_THE_PAGE)
async def document_of_the_page(request: Request) -> Response:
    return Response((await _documents(request)).brief, media_type="application/json")


class _Documents(NamedTuple):
    whole: bytes
    brief: bytes


async def _documents(request: Request) -> _Documents:
    state = request.app.state
    async with state.document_lock:  # it takes seconds, once
        if state.documents is None:
            state.documents = await run_in_threadpool(_made, request.app)
    found: _Documents = state.documents
    return found


def _made(app: FastAPI) -> _Documents:
    whole = app.openapi()
    return _Documents(json.dumps(whole).encode(), json.dumps(in_brief(whole)).encode())


def install(app: FastAPI, *, keys_asked_for: bool) -> None:
    """Add the page, its files and the document, which is arranged for people when it is first asked for."""
    made = app.openapi

    def openapi() -> dict[str, object]:
        return app.openapi_schema or arranged(made(), keys_asked_for=keys_asked_for)

    app.openapi = openapi  # type: ignore[method-assign] # the way that FastAPI documents
    app.state.documents, app.state.document_lock = None, asyncio.Lock()
    app.mount(f"/{ASSETS}", StaticFiles(packages=[("fastapi_swagger", "resources")]))
    app.include_router(router)
