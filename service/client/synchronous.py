"""The blocking client, generated from ``asynchronous.py``: edit that file."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, cast
from urllib.parse import quote

import httpx
from httpx_sse import EventSource, ServerSentEvent
from pydantic import BaseModel

from service.api.response_models.encodings import ExportResult, FullMethodList, MethodInfo, PolicyInfo
from service.api.response_models.generation import GenerateResponse
from service.api.response_models.jobs import JobList, UnitList
from service.api.response_models.models import ModelInfo, ModelList, Ready
from service.client.errors import RopewayError, incomplete, refusal, translated, written
from service.client.events import StreamEvent, job_event, json_of, payload, read, stream_event, typed, typed_result
from service.client.requests import (
    Encoding,
    GenerateOptions,
    PerplexityOptions,
    Prompt,
    comparison_path,
    connection,
    file_path,
    given,
    idempotent,
    job_path,
)
from service.client.retries import RECONNECT_S, Following, retrying
from service.evaluation.comparison.results import ComparisonResult
from service.evaluation.perplexity.results import PerplexityResult
from service.evaluation.results import EvaluationResult, Progress
from service.jobs.records import JobInfo, JobState, UnitDone

if TYPE_CHECKING:
    from service.evaluation.recommend.results import RecommendResult
    from service.evaluation.search.results import SearchResult

T = TypeVar("T", bound=BaseModel)
Headers = Mapping[str, str] | None


class Ropeway:
    """A client of one server. Every method raises ``RopewayError`` and nothing else.

    ``timeout`` is the longest silence in seconds; streams and perplexity send bytes every few seconds. The client
    repeats a request up to ``max_retries`` times after 429, 503 or a connection that fails before an answer. It waits
    at least as long as the server asks. ``http_options`` go to ``httpx.Client``: ``proxy``, ``verify``,
    ``transport``.
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
        """Generate from every prompt under every encoding; each pair is one result."""
        return self._ask(GenerateResponse, "POST", "/generate", given({"prompt": prompt, "pe": pe, **options}))

    def stream(
        self, prompt: Prompt, *, pe: Encoding | Sequence[Encoding] | None = None, **options: Unpack[GenerateOptions]
    ) -> Generator[StreamEvent]:
        """Generate, and yield events as they arrive. Closing the generator ends the work on the server;
        ``contextlib.closing`` closes it when a loop ends early."""
        body = given({"prompt": prompt, "pe": pe, **options, "stream": True})
        with closing(self._events("POST", "/generate", body)) as events:
            for event, response in events:
                yield stream_event(event, response)

    def perplexity(
        self,
        input: Prompt | None = None,
        *,
        methods: Encoding | Sequence[Encoding] | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        **options: Unpack[PerplexityOptions],
    ) -> PerplexityResult:
        """Measure the perplexity of documents under every method at every length."""
        body = given({"input": input, "methods": methods, **options})
        result = self._measured("perplexity", body, on_progress)
        assert isinstance(result, PerplexityResult)
        return result

    def recommend(
        self,
        length: int | None = None,
        input: Prompt | None = None,
        *,
        methods: Encoding | Sequence[Encoding] | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        **fields: Any,
    ) -> RecommendResult:
        """The encoding to use at ``length`` tokens, among ``methods`` or what the methods propose, with evidence."""
        body = given({"length": length, "input": input, "methods": methods, **fields})
        return cast("RecommendResult", self._measured("recommend", body, on_progress))

    def search(
        self,
        length: int | None = None,
        input: Prompt | None = None,
        *,
        methods: Encoding | Sequence[Encoding] | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        **fields: Any,
    ) -> SearchResult:
        """A factor for each rotary pair at ``length`` tokens, compared with ``methods`` on text that it never read."""
        body = given({"length": length, "input": input, "methods": methods, **fields})
        return cast("SearchResult", self._measured("search", body, on_progress))

    def evaluate(
        self, evaluation: str, *, on_progress: Callable[[Progress], None] | None = None, **fields: Any
    ) -> EvaluationResult:
        """Run an evaluation, given its name and the fields of its body, and wait for the result. ``submit`` runs a
        long one as a job."""
        return self._measured(evaluation, given(fields), on_progress)

    def submit(self, evaluation: str, **fields: Any) -> JobInfo:
        """Queue an evaluation as a job, which outlives the connection and the server process."""
        body = {"evaluation": evaluation, **given(fields)}
        return self._ask(JobInfo, "POST", "/jobs", body, headers=idempotent())

    def job(self, job_id: str) -> JobInfo:
        """State and progress of a job."""
        return self._ask(JobInfo, "GET", job_path(job_id))

    def jobs(
        self,
        *,
        state: JobState | None = None,
        limit: int = 100,
        before: str | None = None,
    ) -> list[JobInfo]:
        """The newest jobs of this API key, newest first; only those older than the job ``before``, if given."""
        query = httpx.QueryParams(given({"limit": limit, "state": state, "before": before}))
        listed = self._ask(JobList, "GET", f"/jobs?{query}")
        return listed.jobs

    def follow(self, job_id: str, *, after: int = 0) -> Generator[UnitDone | JobInfo]:
        """Yield the units of a job as they finish, from number ``after`` + 1, with job states in between.

        The last item is the finished job. A lost connection is resumed at the same unit.
        """
        following = Following(after)
        while True:
            try:
                asked = self._events("GET", job_path(job_id, "events"), after=following.after)
                with closing(asked) as events:
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
        """End a job; a job that has ended stays as it is."""
        self._answer("DELETE", job_path(job_id))

    def resume(self, job_id: str) -> JobInfo:
        """Queue a cancelled or failed job again; its finished units are not repeated."""
        return self._ask(JobInfo, "POST", job_path(job_id, "resume"))

    def units(self, job_id: str, *, include_text: bool = False) -> list[UnitDone]:
        """The finished units of a job in any state, in the order of finishing. ``include_text`` gives each the prompt
        that its evaluation wrote."""
        listed = self._ask(UnitList, "GET", file_path(job_id, "units.json", include_text))
        return listed.units

    def forget(self, job_id: str) -> None:
        """Remove a job that has ended, and its result."""
        self._answer("DELETE", f"{job_path(job_id)}?forget=true")

    def result(self, job_id: str, *, include_text: bool = False) -> EvaluationResult:
        """The result of a finished job. A job that ended early has a result over its complete methods, and
        ``partial`` names the missing ones. ``include_text`` gives each output the prompt that its evaluation wrote."""
        response = self._answer("GET", file_path(job_id, "results.json", include_text))
        return typed_result(json_of(response), response)

    def compare(
        self, jobs: Sequence[str], *, names: Sequence[str] | None = None, baseline: Encoding | None = None
    ) -> ComparisonResult:
        """The results of ``jobs`` of one evaluation beside each other: two models, or one before and after training.

        Each method has the ratio to its partner, or the difference from it, with a 95 % interval. The partner is the
        method with the same label in the first job, or ``baseline``. In a single job it is the model's own
        encoding, else the first method. ``names`` has one for each job. An empty one is its model, if all models
        differ, or the start of its id.
        """
        return self._ask(ComparisonResult, "GET", comparison_path(jobs, names, baseline))

    def download(
        self,
        job_id: str,
        file: str,
        *,
        include_text: bool = False,
        picture: str | None = None,
    ) -> bytes:
        """``results.csv``, ``results.parquet``, ``report.html``, ``plot.png`` or ``plot.svg`` of a job that has a
        result, or ``units.csv`` of any job. A report opens without server or network; ``include_text`` puts the texts
        in. ``picture`` names another picture than the first."""
        response = self._answer("GET", file_path(job_id, file, include_text, picture))
        return response.content

    def method(self, name: str) -> MethodInfo:
        """One positional encoding, with the JSON schema of its parameters."""
        return self._ask(MethodInfo, "GET", f"/methods/{quote(name, safe='')}")

    def methods(self) -> list[MethodInfo]:
        """All positional encodings, as ``method`` returns them."""
        listed = self._ask(FullMethodList, "GET", "/methods?full=true")
        return listed.methods

    def export(
        self,
        pe: Encoding,
        target: str,
        *,
        length: int | None = None,
        model: str | None = None,
    ) -> ExportResult:
        """An encoding in the syntax of another system (``vllm``, ``llama.cpp``), for at most ``length`` tokens."""
        body = given({"pe": pe, "target": target, "length": length, "model": model})
        return self._ask(ExportResult, "POST", "/export", body)

    def calibrate(self, result_id: str, *, partial: bool = False) -> PolicyInfo:
        """Make the encodings of a recommendation, by its id, those of ``auto`` for this API key. ``partial`` allows one
        that ended early."""
        return self._ask(PolicyInfo, "POST", "/policies", {"result": result_id, "partial": partial})

    def forget_policy(self, model: str) -> None:
        """Remove the policy that ``calibrate`` made for a model."""
        self._answer("DELETE", f"/policies/{quote(model, safe='')}")

    def models(self) -> list[ModelInfo]:
        """The served models; one of them is the default."""
        listed = self._ask(ModelList, "GET", "/models")
        return listed.models

    def health(self) -> Ready:
        """The load of every model, without retries: a server that is not ready raises an error with status 503."""
        return read(Ready, self._send("GET", "/health/ready"))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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

    def _ask(
        self, kind: type[T], method: str, path: str, body: dict[str, Any] | None = None, *, headers: Headers = None
    ) -> T:
        return read(kind, self._answer(method, path, body, headers))

    def _answer(
        self, method: str, path: str, body: dict[str, Any] | None = None, headers: Headers = None
    ) -> httpx.Response:
        response: httpx.Response = self._retrying.copy()(self._send, method, path, body, headers)
        return response

    def _events(
        self, method: str, path: str, body: dict[str, Any] | None = None, after: int | None = None
    ) -> Generator[tuple[ServerSentEvent, httpx.Response]]:
        """Events until ``[DONE]``, each with its response."""
        seen = None if after is None else {"Last-Event-ID": str(after)}
        with translated(self._http.base_url):
            response: httpx.Response = self._retrying.copy()(self._send, method, path, body, seen, True)
            with closing(response), nullcontext(EventSource(response).iter_sse()) as events:
                for event in events:
                    if event.data == "[DONE]":
                        return
                    if event.data:  # httpx_sse makes an empty event of a comment behind one with a number
                        yield event, response
        raise incomplete(response)

    def _send(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        headers: Headers = None,
        stream: bool = False,
    ) -> httpx.Response:
        with translated(self._http.base_url):
            with written(body):
                request = self._http.build_request(method, path, json=body, headers=headers)
            response = self._http.send(request, stream=stream)
            if not response.is_success:
                with closing(response):
                    response.read()
                raise refusal(response)
            return response
