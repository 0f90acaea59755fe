"""``/ui/``: the files of the page, which need no API key. The page asks for one and sends it with its requests."""

from __future__ import annotations

import gzip
import hashlib
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import Response

from service.api.files import unpacked_response
from service.errors import ApiError
from service.reports.pages import policy

router = APIRouter(include_in_schema=False)

INDEX = "index.html"
MEDIA_TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
    "txt": "text/plain",
}
FOR_EVER = "public, max-age=31536000, immutable"


class File(NamedTuple):
    """A file under gzip, and the hash of its contents."""

    packed: bytes
    version: str


@router.get("/")
@router.get("/ui")
async def to_the_page() -> Response:
    """Relative, so that it works behind any prefix of a proxy and with any host."""
    return Response(status_code=307, headers={"Location": "ui/"})


@router.get("/ui/")
async def page(request: Request) -> Response:
    """The page, whose files have their versions in their addresses."""
    headers = {"Content-Security-Policy": policy((), scripts_of_server=True, asks_server=True)}
    return _answer(INDEX, request, headers)


@router.get("/ui/{name}")
async def file(name: str, request: Request) -> Response:
    """A file of the page; with its version in the address, browsers keep it."""
    return _answer(name, request, {})


def _answer(name: str, request: Request, headers: dict[str, str]) -> Response:
    found = _files().get(name)
    if found is None:
        raise ApiError(404, "the page has no such file", code="not_found")
    tag = f'"{found.version}"'
    caching = FOR_EVER if request.query_params.get("v") == found.version else "no-cache"
    headers = {**headers, "ETag": tag, "Cache-Control": caching, "X-Content-Type-Options": "nosniff"}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return unpacked_response(found.packed, MEDIA_TYPES[name.rpartition(".")[2]], request, headers)


@cache
def _files() -> dict[str, File]:
    """Every file by name."""
    contents = {path.name: path.read_bytes() for path in files("service.ui").joinpath("built").iterdir()}
    index = contents.pop(INDEX).decode()
    made = {name: _file(data) for name, data in contents.items()}
    for name, (_, version) in made.items():
        index = index.replace(f'"{name}"', f'"{name}?v={version}"')
    return {**made, INDEX: _file(index.encode())}


def _file(data: bytes) -> File:
    return File(gzip.compress(data, 9, mtime=0), hashlib.sha256(data).hexdigest()[:16])
