"""Files of results as answers: made once, most of them in child processes, and cached."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel

from service import context
from service.errors import ApiError, bad_request
from service.jobs.records import JobInfo
from service.jobs.storage.results import Packed, unpacked
from service.reports.render import file_of
from service.reports.rendered import PAGE, PageOptions, Rendered
from service.reports.table import table_of_packed, unpacked_size
from service.settings import Settings
from service.sharing.workers import Workers

KEPT_BYTES = 32 << 20
"""Size of the cache in bytes."""

SMALL_RESULT = 512 << 10
"""Bytes of a result's JSON that a thread reads and writes as CSV within some 30 ms."""

Make = Callable[[], Coroutine[Any, Any, Rendered]]


def sends(media_type: str) -> dict[str, Any]:
    """Arguments of a route whose answers have this type alone."""
    return {"response_class": Response, "responses": {200: {"content": {media_type: {}}}}}


class RenderedFiles:
    """A cache of files. Simultaneous requests for one file share its drawing, which ends when no caller waits for
    it."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, Rendered] = OrderedDict()
        self._making: dict[Hashable, tuple[asyncio.Task[Rendered], list[None]]] = {}

    async def get(self, key: Hashable, make: Make) -> Rendered:
        """The file under ``key``, made by ``make`` where there is none."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        if key not in self._making:
            self._making[key] = asyncio.create_task(make()), []
        task, waiting = self._making[key]
        waiting.append(None)
        try:
            rendered = await asyncio.shield(task)
        finally:
            waiting.pop()
            if not waiting:
                task.cancel()
                self._making.pop(key, None)
        self._keep(key, rendered)
        return rendered

    def _keep(self, key: Hashable, rendered: Rendered) -> None:
        self._kept[key] = rendered
        while sum(len(file.data) for file in self._kept.values()) > KEPT_BYTES:
            self._kept.popitem(last=False)


Standalone = Annotated[
    bool, Query(description="Everything in the page, so that it can be saved, mailed and opened without the server.")
]


PictureName = Annotated[
    str | None,
    Query(max_length=100, description="Another picture than the main one; figures.json of a job has their names."),
]


async def result_file(
    form: str,
    result_id: str,
    packed: Packed,
    request: Request,
    job: JobInfo | None = None,
    options: PageOptions = PAGE,
) -> Response:
    """The current tenant's result as one of the forms of ``service.reports.forms``.

    Raises:
        ApiError: 400 for a picture that it has not, or a file larger than an answer may be; QueueFull from the workers.
    """
    files: RenderedFiles = request.app.state.files
    workers: Workers = request.app.state.workers
    told = None if job is None else job.model_dump_json()

    async def make() -> Rendered:
        if form == "csv" and unpacked_size(packed.data) <= SMALL_RESULT:
            return await workers.run(table_of_packed, packed.evaluation, packed.data)
        return await workers.render(file_of, form, packed.evaluation, packed.data, told, options)

    # A result that is partial may become whole: the key has gzip's checksum and size of the bytes at hand.
    contents = packed.data[-8:]
    key = context.current().tenant, result_id, contents, form, told, options
    return file_response(await files.get(key, make), request)


def file_response(rendered: Rendered, request: Request) -> Response:
    """Raises:
    ApiError: 400 for a file that is refused, or is larger than an answer may be.
    """
    if rendered.refusal is not None:
        field = rendered.refused_field
        raise bad_request(f"{field}: {rendered.refusal}", field)
    settings: Settings = request.app.state.settings
    if len(rendered.data) > settings.max_answer_bytes:
        message = f"this file has {len(rendered.data)} bytes and an answer at most {settings.max_answer_bytes}"
        raise ApiError(400, f"{message}: ask for fewer methods or lengths", code="answer_too_large")
    headers = {} if rendered.policy is None else {"Content-Security-Policy": rendered.policy}
    if rendered.packed:
        return unpacked_response(rendered.data, rendered.media_type, request, headers)
    return Response(rendered.data, media_type=rendered.media_type, headers=headers)


async def json_response(answer: BaseModel, size: int, request: Request) -> Response:
    """``answer``, which holds ``size`` numbers or texts: many are written on a thread."""
    workers: Workers = request.app.state.workers
    return Response(await workers.run_sized(size, answer.model_dump_json), media_type="application/json")


def unpacked_response(data: bytes, media_type: str, request: Request, headers: dict[str, str]) -> Response:
    """An answer from gzip: as it is to clients that take gzip, unpacked piece by piece to others."""
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(
            data, media_type=media_type, headers={**headers, "Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
        )
    # ``GZipMiddleware`` says that this answer varies.
    return StreamingResponse(unpacked(data), media_type=media_type, headers=headers)
