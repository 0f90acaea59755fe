"""The client for ordinary code; ``asynchronous.py`` is the same with ``await``."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Any, Self, TypeVar, Unpack

import httpx
from httpx_sse import EventSource, ServerSentEvent
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
from service.client.retries import retrying
from service.evaluation.results import PerplexityResult, Progress

T = TypeVar("T", bound=BaseModel)
Received = tuple[ServerSentEvent, httpx.Response]


class Ropeway:
    """A client of one server. Every method raises ``RopewayError`` and nothing else.

    ``timeout`` is in seconds without a byte; streams and perplexity get one every few seconds. A request refused with
    429 or 503, or whose connection fails before an answer, is sent again up to ``max_retries`` times, after as long
    as the server asks for. ``http_options`` go to ``httpx.Client``: ``proxy``, ``verify``, ``transport``.
    """

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
            self._http = httpx.Client(**arguments, **http_options)
        self._retrying = retrying(max_retries)

    def generate(
        self, prompt: Prompt, *, pe: Encoding | Sequence[Encoding] | None = None, **options: Unpack[GenerateOptions]
    ) -> GenerateResponse:
        """Every prompt under every encoding, each in one result."""
        return self._ask(GenerateResponse, "POST", "/generate", generate_body(prompt, pe, options))

    def stream(
        self, prompt: Prompt, *, pe: Encoding | Sequence[Encoding] | None = None, **options: Unpack[GenerateOptions]
    ) -> Generator[StreamEvent]:
        """The same as it comes. Closing the generator ends the work on the server."""
        return self._stream(generate_body(prompt, pe, options))

    def perplexity(
        self,
        input: Prompt | None = None,
        *,
        methods: Encoding | Sequence[Encoding] | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        **options: Unpack[PerplexityOptions],
    ) -> PerplexityResult:
        """Perplexity of documents under every method at every length; ``on_progress`` hears how far it has got."""
        result = None
        with closing(self._events("/perplexity", perplexity_body(input, methods, options))) as events:
            for event, response in events:
                value = payload(event, response)
                if event.event == "result":
                    result = typed(PerplexityResult, value, response)
                elif event.event == "progress" and on_progress is not None:
                    on_progress(typed(Progress, value, response))
        if result is None:
            raise incomplete()
        return result

    def methods(self) -> list[MethodInfo]:
        """Every positional encoding that a request can choose."""
        return self._ask(MethodList, "GET", "/methods").methods

    def models(self) -> list[ModelInfo]:
        """The served models; one of them is the default."""
        return self._ask(ModelList, "GET", "/models").models

    def health(self) -> Ready:
        """The load of every model. Not tried again: a server that is not ready is an error with status 503."""
        with translated(self._http.base_url):
            return read(Ready, self._http.get("/health/ready"))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, kind: type[T], method: str, path: str, body: dict[str, Any] | None = None) -> T:
        def once() -> T:
            with translated(self._http.base_url):
                return read(kind, self._http.request(method, path, json=body))

        return self._retrying.copy()(once)

    def _stream(self, body: dict[str, Any]) -> Generator[StreamEvent]:
        with closing(self._events("/generate", body)) as events:
            for event, response in events:
                yield stream_event(event, response)

    def _events(self, path: str, body: dict[str, Any]) -> Generator[Received]:
        """Events until ``[DONE]``, with the response that they are of."""
        response = self._retrying.copy()(self._open, path, body)
        with closing(response), translated(self._http.base_url):
            for event in EventSource(response).iter_sse():
                if event.data == "[DONE]":
                    return
                yield event, response
        raise incomplete(response)

    def _open(self, path: str, body: dict[str, Any]) -> httpx.Response:
        with translated(self._http.base_url):
            request = self._http.build_request("POST", path, json={**body, "stream": True})
            response = self._http.send(request, stream=True)
            if not response.is_success:
                with closing(response):
                    response.read()
                raise refusal(response)
            return response
