"""The client for asyncio; ``synchronous.py`` is the same without ``await``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Self, TypeVar, Unpack

import httpx
from httpx_sse import EventSource
from pydantic import BaseModel

from service.api.answers import GenerateResponse, MethodInfo, MethodList, ModelInfo, ModelList, Ready
from service.client.errors import incomplete, refusal, translated
from service.client.events import StreamEvent, payload, read, stream_event, typed
from service.client.requests import (
    Encoding,
    GenerateOptions,
    PerplexityOptions,
    Prompt,
    connection,
    generate_body,
    perplexity_body,
)
from service.client.retries import async_retrying
from service.client.synchronous import Received
from service.evaluation.results import PerplexityResult, Progress

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
        result = None
        async with aclosing(self._events("/perplexity", perplexity_body(input, methods, options))) as events:
            async for event, response in events:
                value = payload(event, response)
                if event.event == "result":
                    result = typed(PerplexityResult, value, response)
                elif event.event == "progress" and on_progress is not None:
                    on_progress(typed(Progress, value, response))
        if result is None:
            raise incomplete()
        return result

    async def methods(self) -> list[MethodInfo]:
        """Every positional encoding that a request can choose."""
        return (await self._ask(MethodList, "GET", "/methods")).methods

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
        async def once() -> T:
            with translated(self._http.base_url):
                return read(kind, await self._http.request(method, path, json=body))

        return await self._retrying.copy()(once)

    async def _stream(self, body: dict[str, Any]) -> AsyncGenerator[StreamEvent]:
        async with aclosing(self._events("/generate", body)) as events:
            async for event, response in events:
                yield stream_event(event, response)

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[Received]:
        """Events until ``[DONE]``, with the response that they are of."""
        response: httpx.Response = await self._retrying.copy()(self._open, path, body)
        async with aclosing(response):
            with translated(self._http.base_url):
                async with aclosing(EventSource(response).aiter_sse()) as events:
                    async for event in events:
                        if event.data == "[DONE]":
                            return
                        yield event, response
        raise incomplete(response)

    async def _open(self, path: str, body: dict[str, Any]) -> httpx.Response:
        with translated(self._http.base_url):
            request = self._http.build_request("POST", path, json={**body, "stream": True})
            response = await self._http.send(request, stream=True)
            if not response.is_success:
                async with aclosing(response):
                    await response.aread()
                raise refusal(response)
            return response
