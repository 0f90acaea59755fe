"""The client for ordinary code; ``asynchronous.py`` is the same with ``await``."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import Any, Self, TypeVar, Unpack
from urllib.parse import quote

import httpx
from httpx_sse import EventSource, ServerSentEvent
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
from service.client.retries import RECONNECT_S, Following, retrying
from service.evaluation.perplexity.results import PerplexityResult
from service.evaluation.results import EvaluationResult, Progress
from service.jobs.records import JobInfo, JobState, UnitDone

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
        result = self._measured("perplexity", perplexity_body(input, methods, options), on_progress)
        assert isinstance(result, PerplexityResult)
        return result

    def evaluate(
        self, evaluation: str, *, on_progress: Callable[[Progress], None] | None = None, **fields: Any
    ) -> EvaluationResult:
        """Any evaluation, by its name and the fields of its body, answered when it is done. For what may take long,
        ``submit`` makes a job of it."""
        return self._measured(evaluation, evaluation_body(fields), on_progress)

    def submit(self, evaluation: str, **fields: Any) -> JobInfo:
        """Queue an evaluation: it goes on whether or not anybody waits, and past the server's death."""
        body = {"evaluation": evaluation, **evaluation_body(fields)}
        response = self._answer("POST", "/jobs", body, idempotent())
        return read(JobInfo, response)

    def job(self, job_id: str) -> JobInfo:
        """How far a job is."""
        return self._ask(JobInfo, "GET", f"/jobs/{job_id}")

    def jobs(self, *, state: JobState | None = None, limit: int = 100, before: str | None = None) -> list[JobInfo]:
        """The newest jobs of this API key, or the newest that are older than the job ``before``; newest first."""
        asked = {"limit": limit, "state": state, "before": before}
        query = httpx.QueryParams({name: value for name, value in asked.items() if value is not None})
        return (self._ask(JobList, "GET", f"/jobs?{query}")).jobs

    def follow(self, job_id: str, *, after: int = 0) -> Generator[UnitDone | JobInfo]:
        """Units of a job as they are finished, from the one numbered ``after`` + 1 on, with the job in between as it
        gets on; the last item is the job when it has ended. Goes on where it was when a connection is lost."""
        following = Following(after)
        while True:
            try:
                with closing(self._events("GET", f"/jobs/{job_id}/events", after=following.after)) as events:
                    for event, response in events:
                        item = job_event(event, response)
                        following.take(item, event.event)
                        yield item
                        if following.ended:
                            return
                raise incomplete()
            except RopewayError as error:
                following.lost(error)
            time.sleep(RECONNECT_S)

    def cancel(self, job_id: str) -> None:
        """End a job; one that has ended stays as it is."""
        self._answer("DELETE", f"/jobs/{job_id}")

    def resume(self, job_id: str) -> JobInfo:
        """Go on with a job that was cancelled or failed: finished units are kept, the rest is queued again."""
        return self._ask(JobInfo, "POST", f"/jobs/{job_id}/resume")

    def units(self, job_id: str) -> list[UnitDone]:
        """The finished units of a job in any state, in the order of finishing."""
        return (self._ask(UnitList, "GET", f"/jobs/{job_id}/units.json")).units

    def forget(self, job_id: str) -> None:
        """Remove a job that has ended, and its result."""
        self._answer("DELETE", f"/jobs/{job_id}?forget=true")

    def result(self, job_id: str) -> EvaluationResult:
        """The result of a job that is done; of one that ended early, that of the methods that are complete: its
        ``partial`` says what is missing."""
        response = self._answer("GET", f"/jobs/{job_id}/results.json")
        return typed_result(json_of(response), response)

    def download(self, job_id: str, file: str, *, include_text: bool = False) -> bytes:
        """``results.csv``, ``results.parquet``, ``report.html`` or ``plot.png`` of a job that has a result, or
        ``units.csv`` of any. A report needs neither server nor network to be read, and has the texts that were sent
        where ``include_text`` asks for them."""
        return self._answer("GET", file_path(job_id, file, include_text)).content

    def method(self, name: str) -> MethodInfo:
        """One positional encoding that a request can choose, with the JSON schema of its parameters."""
        return self._ask(MethodInfo, "GET", f"/methods/{quote(name, safe='')}")

    def methods(self) -> list[MethodInfo]:
        """Every one of them."""
        return self._ask(FullMethodList, "GET", "/methods?full=true").methods

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
        return read(kind, self._answer(method, path, body))

    def _measured(
        self, evaluation: str, body: dict[str, Any], on_progress: Callable[[Progress], None] | None
    ) -> EvaluationResult:
        result = None
        with closing(self._events("POST", f"/{evaluation}", {**body, "stream": True})) as events:
            for event, response in events:
                value = payload(event, response)
                if event.event == "result":
                    result = typed_result(value, response)
                elif event.event == "progress" and on_progress is not None:
                    on_progress(typed(Progress, value, response))
        if result is None:
            raise incomplete()
        return result

    def _answer(
        self, method: str, path: str, body: dict[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        def once() -> httpx.Response:
            with translated(self._http.base_url):
                response: httpx.Response = self._http.request(method, path, json=body, headers=headers)
            if not response.is_success:
                raise refusal(response)
            return response

        return self._retrying.copy()(once)

    def _stream(self, body: dict[str, Any]) -> Generator[StreamEvent]:
        with closing(self._events("POST", "/generate", {**body, "stream": True})) as events:
            for event, response in events:
                yield stream_event(event, response)

    def _events(
        self, method: str, path: str, body: dict[str, Any] | None = None, after: int | None = None
    ) -> Generator[Received]:
        """Events until ``[DONE]``, with the response that they are of."""
        response = self._retrying.copy()(self._open, method, path, body, after)
        with closing(response), translated(self._http.base_url):
            for event in EventSource(response).iter_sse():
                if event.data == "[DONE]":
                    return
                yield event, response
        raise incomplete(response)

    def _open(self, method: str, path: str, body: dict[str, Any] | None, after: int | None) -> httpx.Response:
        with translated(self._http.base_url):
            seen = None if after is None else {"Last-Event-ID": str(after)}
            request = self._http.build_request(method, path, json=body, headers=seen)
            response = self._http.send(request, stream=True)
            if not response.is_success:
                with closing(response):
                    response.read()
                raise refusal(response)
            return response
