"""The client for asyncio; ``synchronous.py`` is the same without ``await``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Self, TypeVar, Unpack
from urllib.parse import quote

import httpx
from httpx_sse import EventSource
from pydantic import BaseModel

from service.api.responses import (
    FullMethodList,
    GenerateResponse,
    JobList,
    MethodInfo,
    ModelInfo,
    ModelList,
    Ready,
    UnitList,
)
from service.client.errors import RopewayError, incomplete, refusal, translated
from service.client.events import (
    StreamEvent,
    job_event,
    json_of,
    payload,
    read,
    stream_event,
    typed,
    typed_result,
)
from service.client.requests import (
    Encoding,
    GenerateOptions,
    PerplexityOptions,
    Prompt,
    connection,
    evaluation_body,
    file_path,
    generate_body,
    idempotent,
    perplexity_body,
)
from service.client.retries import RECONNECT_S, Following, async_retrying
from service.client.synchronous import Received
from service.evaluation.perplexity.results import PerplexityResult
from service.evaluation.results import EvaluationResult, Progress
from service.jobs.records import JobInfo, JobState, UnitDone

T = TypeVar("T", bound=BaseModel)


class AsyncRopeway:
    """``Ropeway`` for asyncio, with the same arguments, methods and errors; close it with ``aclose``."""

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: float | httpx.Timeout | None = 600.0,
        max_retries: int = 2,
        **http_options: Any,
    ) -> None:
        arguments = connection(base_url, api_key, timeout)
        with translated(arguments["base_url"]):
            self._http = httpx.AsyncClient(**arguments, **http_options)
        self._retrying = async_retrying(max_retries)

    async def generate(
        self, prompt: Prompt, *, pe: Encoding | Sequence[Encoding] | None = None, **options: Unpack[GenerateOptions]
    ) -> GenerateResponse:
        """Every prompt under every encoding, each in one result."""
        return await self._ask(GenerateResponse, "POST", "/generate", generate_body(prompt, pe, options))

    def stream(
        self, prompt: Prompt, *, pe: Encoding | Sequence[Encoding] | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[StreamEvent]:
        """The same as it comes. Closing the generator ends the work on the server; leaving a loop over it does not
        close it at once, ``contextlib.aclosing`` does."""
        return self._stream(generate_body(prompt, pe, options))

    async def perplexity(
        self,
        input: Prompt | None = None,
        *,
        methods: Encoding | Sequence[Encoding] | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        **options: Unpack[PerplexityOptions],
    ) -> PerplexityResult:
        """Perplexity of documents under every method at every length; ``on_progress`` hears how far it has got."""
        result = await self._measured("perplexity", perplexity_body(input, methods, options), on_progress)
        assert isinstance(result, PerplexityResult)
        return result

    async def evaluate(
        self, evaluation: str, *, on_progress: Callable[[Progress], None] | None = None, **fields: Any
    ) -> EvaluationResult:
        """Any evaluation, by its name and the fields of its body, answered when it is done. For what may take long,
        ``submit`` makes a job of it."""
        return await self._measured(evaluation, evaluation_body(fields), on_progress)

    async def submit(self, evaluation: str, **fields: Any) -> JobInfo:
        """Queue an evaluation: it goes on whether or not anybody waits, and past the server's death."""
        body = {"evaluation": evaluation, **evaluation_body(fields)}
        response = await self._answer("POST", "/jobs", body, idempotent())
        return read(JobInfo, response)

    async def job(self, job_id: str) -> JobInfo:
        """How far a job is."""
        return await self._ask(JobInfo, "GET", f"/jobs/{job_id}")

    async def jobs(
        self, *, state: JobState | None = None, limit: int = 100, before: str | None = None
    ) -> list[JobInfo]:
        """The newest jobs of this API key, or the newest that are older than the job ``before``; newest first."""
        asked = {"limit": limit, "state": state, "before": before}
        query = httpx.QueryParams({name: value for name, value in asked.items() if value is not None})
        return (await self._ask(JobList, "GET", f"/jobs?{query}")).jobs

    async def follow(self, job_id: str, *, after: int = 0) -> AsyncGenerator[UnitDone | JobInfo]:
        """Units of a job as they are finished, from the one numbered ``after`` + 1 on, with the job in between as it
        gets on; the last item is the job when it has ended. Goes on where it was when a connection is lost."""
        following = Following(after)
        while True:
            try:
                async with aclosing(self._events("GET", f"/jobs/{job_id}/events", after=following.after)) as events:
                    async for event, response in events:
                        item = job_event(event, response)
                        following.take(item, event.event)
                        yield item
                        if following.ended:
                            return
                raise incomplete()
            except RopewayError as error:
                following.lost(error)
            await asyncio.sleep(RECONNECT_S)

    async def cancel(self, job_id: str) -> None:
        """End a job; one that has ended stays as it is."""
        await self._answer("DELETE", f"/jobs/{job_id}")

    async def resume(self, job_id: str) -> JobInfo:
        """Go on with a job that was cancelled or failed: finished units are kept, the rest is queued again."""
        return await self._ask(JobInfo, "POST", f"/jobs/{job_id}/resume")

    async def units(self, job_id: str) -> list[UnitDone]:
        """The finished units of a job in any state, in the order of finishing."""
        return (await self._ask(UnitList, "GET", f"/jobs/{job_id}/units.json")).units

    async def forget(self, job_id: str) -> None:
        """Remove a job that has ended, and its result."""
        await self._answer("DELETE", f"/jobs/{job_id}?forget=true")

    async def result(self, job_id: str) -> EvaluationResult:
        """The result of a job that is done; of one that ended early, that of the methods that are complete: its
        ``partial`` says what is missing."""
        response = await self._answer("GET", f"/jobs/{job_id}/results.json")
        return typed_result(json_of(response), response)

    async def download(self, job_id: str, file: str, *, include_text: bool = False) -> bytes:
        """``results.csv``, ``results.parquet``, ``report.html`` or ``plot.png`` of a job that has a result, or
        ``units.csv`` of any. A report needs neither server nor network to be read, and has the texts that were sent
        where ``include_text`` asks for them."""
        return (await self._answer("GET", file_path(job_id, file, include_text))).content

    async def method(self, name: str) -> MethodInfo:
        """One positional encoding that a request can choose, with the JSON schema of its parameters."""
        return await self._ask(MethodInfo, "GET", f"/methods/{quote(name, safe='')}")

    async def methods(self) -> list[MethodInfo]:
        """Every one of them."""
        return (await self._ask(FullMethodList, "GET", "/methods?full=true")).methods

    async def models(self) -> list[ModelInfo]:
        """The served models; one of them is the default."""
        return (await self._ask(ModelList, "GET", "/models")).models

    async def health(self) -> Ready:
        """The load of every model. Not tried again: a server that is not ready is an error with status 503."""
        with translated(self._http.base_url):
            return read(Ready, await self._http.get("/health/ready"))

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _ask(self, kind: type[T], method: str, path: str, body: dict[str, Any] | None = None) -> T:
        return read(kind, await self._answer(method, path, body))

    async def _measured(
        self, evaluation: str, body: dict[str, Any], on_progress: Callable[[Progress], None] | None
    ) -> EvaluationResult:
        result = None
        async with aclosing(self._events("POST", f"/{evaluation}", {**body, "stream": True})) as events:
            async for event, response in events:
                value = payload(event, response)
                if event.event == "result":
                    result = typed_result(value, response)
                elif event.event == "progress" and on_progress is not None:
                    on_progress(typed(Progress, value, response))
        if result is None:
            raise incomplete()
        return result

    async def _answer(
        self, method: str, path: str, body: dict[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        async def once() -> httpx.Response:
            with translated(self._http.base_url):
                response: httpx.Response = await self._http.request(method, path, json=body, headers=headers)
            if not response.is_success:
                raise refusal(response)
            return response

        return await self._retrying.copy()(once)

    async def _stream(self, body: dict[str, Any]) -> AsyncGenerator[StreamEvent]:
        async with aclosing(self._events("POST", "/generate", {**body, "stream": True})) as events:
            async for event, response in events:
                yield stream_event(event, response)

    async def _events(
        self, method: str, path: str, body: dict[str, Any] | None = None, after: int | None = None
    ) -> AsyncGenerator[Received]:
        """Events until ``[DONE]``, with the response that they are of."""
        response: httpx.Response = await self._retrying.copy()(self._open, method, path, body, after)
        async with aclosing(response):
            with translated(self._http.base_url):
                async with aclosing(EventSource(response).aiter_sse()) as events:
                    async for event in events:
                        if event.data == "[DONE]":
                            return
                        yield event, response
        raise incomplete(response)

    async def _open(self, method: str, path: str, body: dict[str, Any] | None, after: int | None) -> httpx.Response:
        with translated(self._http.base_url):
            seen = None if after is None else {"Last-Event-ID": str(after)}
            request = self._http.build_request(method, path, json=body, headers=seen)
            response = await self._http.send(request, stream=True)
            if not response.is_success:
                async with aclosing(response):
                    await response.aread()
                raise refusal(response)
            return response
