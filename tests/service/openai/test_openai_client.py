"""The ``openai`` package against the live server: sync, async, streams, retries, errors; and curl."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import httpx2
import openai
import pytest
from fastapi import FastAPI

from service.api import errors
from service.cli.server import local_server
from service.engine.engine import Engine
from service.engine.failures import EngineFailed
from service.engine.generation import Generation
from service.engine.thread.out_of_memory import OutOfMemory
from service.errors import deadline_exceeded
from service.settings import Settings
from tests.service.conftest import TEXT
from tests.service.openai.conftest import answer, counts

YARN: dict[str, Any] = {"pe": {"method": "yarn", "factor": 4}}
MESSAGES: list[Any] = [{"role": "user", "content": "The 3 ropes?"}]


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_completions(client: openai.OpenAI, http: httpx.Client) -> None:
    got = client.completions.create(
        model="tiny", prompt=TEXT[:80], max_tokens=6, temperature=0, logprobs=1, echo=True, extra_body=YARN
    )
    same = answer(http, prompt=TEXT[:80], max_tokens=6, temperature=0, logprobs=1, echo=True, model="tiny@yarn:4")
    choice = got.choices[0]
    assert choice.text == same["choices"][0]["text"]
    assert choice.logprobs is not None
    assert choice.logprobs.model_dump()["token_logprobs"][0] is None
    assert (choice.model_extra or {})["pe"] == same["choices"][0]["pe"]
    assert got.usage is not None
    assert counts(got.usage.model_dump(exclude_none=True)) == counts(same["usage"])


def test_chat_and_its_stream(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="tiny@ntk:2", messages=MESSAGES, max_completion_tokens=12, temperature=0, logprobs=True, top_logprobs=1
    )
    stream = client.chat.completions.create(
        model="tiny@ntk:2",
        messages=MESSAGES,
        max_completion_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.content or []) == 12
    assert chunks[-1].choices == []
    assert None not in (chunks[-1].usage, whole.usage)
    assert counts(chunks[-1].usage.model_dump()) == counts(whole.usage.model_dump())  # type: ignore[union-attr]


def test_an_answer_goes_back_as_the_client_stores_it(client: openai.OpenAI, http: httpx.Client) -> None:
    options: dict[str, Any] = {"model": "tiny", "max_completion_tokens": 4, "temperature": 0}
    first = client.chat.completions.create(messages=MESSAGES, **options).choices[0].message
    stored = first.model_dump()
    assert {key for key, value in stored.items() if value is None} > {"refusal", "audio", "tool_calls"}
    second = client.chat.completions.create(messages=[*MESSAGES, stored, *MESSAGES], **options)
    plain = [*MESSAGES, {"role": "assistant", "content": first.content}, *MESSAGES]
    same = answer(http, "/v1/chat/completions", messages=plain, **options)
    assert second.choices[0].message.content == same["choices"][0]["message"]["content"]
    assert second.usage is not None
    assert second.usage.prompt_tokens == same["usage"]["prompt_tokens"]


def test_models(client: openai.OpenAI) -> None:
    listed = [model.id for model in client.models.list()]
    assert "tiny" in listed
    assert client.models.retrieve("tiny@yarn:3").id == "tiny@yarn:3"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("tiny@yarn:0")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_async_and_many_at_once(async_client: openai.AsyncOpenAI) -> None:
    async def text(factor: int, stream: bool) -> str:
        arguments: dict[str, Any] = {"prompt": TEXT[:80], "max_tokens": 12, "temperature": 0}
        if not stream:
            got = await async_client.completions.create(model=f"tiny@ntk:{factor}", **arguments)
            return str(got.choices[0].text)
        chunks = await async_client.completions.create(model=f"tiny@ntk:{factor}", stream=True, **arguments)
        return "".join([choice.text async for chunk in chunks for choice in chunk.choices])

    factors = [1, 2, 4, 8]
    whole = await asyncio.gather(*(text(factor, stream=False) for factor in factors))
    streamed = await asyncio.gather(*(text(factor, stream=True) for factor in factors))
    assert whole == streamed
    assert len(set(whole)) > 1


def test_refusals_are_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=[5] * 4090, max_tokens=100, stream=True)
    assert caught.value.code == "context_length_exceeded"
    body: Any = caught.value.body
    assert (body["n_prompt_tokens"], body["n_ctx"]) == (4090, 4096)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="a", extra_body={"pe": {"method": "yarn", "factor": 0}})
    assert caught.value.param == "pe.factor"


def test_a_failure_in_a_stream_is_an_exception_after_the_text(small_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the server of this process, whose engine can be made to fail."""
    whole = Engine.generate

    async def breaks(self: Engine, *args: Any, **kwargs: Any) -> AsyncIterator[Generation]:
        steps = whole(self, *args, **kwargs)
        try:
            async for generation in steps:
                yield generation
                if len(generation.token_ids) == 4:
                    raise EngineFailed("broken on purpose")
        finally:
            await steps.aclose()

    monkeypatch.setattr(Engine, "generate", breaks)
    with openai.OpenAI(base_url=f"{small_url}/v1", api_key="none", max_retries=0) as client:
        for path in (client.completions, client.chat.completions):
            given: dict[str, Any] = {"prompt": TEXT[:80]} if path is client.completions else {"messages": MESSAGES}
            stream: Any = path.create(model="tiny", max_tokens=20, temperature=0, stream=True, **given)
            seen = []
            with pytest.raises(openai.APIError, match="broken on purpose") as caught:
                seen.extend(stream)
            assert caught.value.code == "engine_failed"
            assert len(seen) >= 3


class Sent:
    """Counts what a client sends."""

    def __init__(self) -> None:
        self.requests: list[httpx2.Request] = []
        self._at: dict[int, Callable[[], None]] = {}

    def at(self, count: int, then: Callable[[], None]) -> None:
        """Call ``then`` when request number ``count`` is about to be sent."""
        self._at[count] = then

    def __call__(self, request: httpx2.Request) -> None:
        self.requests.append(request)
        self._at.pop(len(self.requests), lambda: None)()


@pytest.fixture(scope="module")
def small_url(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server in this process with room for one request of 2000 tokens and one waiting.

    Its model never ends by itself.
    """
    endless = tmp_path_factory.mktemp("endless") / "tiny"
    shutil.copytree(tiny, endless)
    for name in ("config.json", "generation_config.json"):
        fields = json.loads((endless / name).read_text()) | {"eos_token_id": None}
        (endless / name).write_text(json.dumps(fields))
    settings = Settings(
        _env_file=None, model=str(endless), cache_tokens=2048, max_queue=1, max_new_tokens=2000, max_batch_tokens=128
    )
    with local_server(settings) as base:
        yield base


def test_a_full_queue_is_retried_until_there_is_room(small_url: str) -> None:
    long: dict[str, Any] = {"prompt": [5], "max_tokens": 2000, "temperature": 1.0, "stream": True}
    sent = Sent()
    with (
        httpx.Client(base_url=small_url, timeout=60) as http,
        openai.DefaultHttpxClient(event_hooks={"request": [sent]}) as counted,
    ):
        client = openai.OpenAI(base_url=f"{small_url}/v1", api_key="none", max_retries=0, http_client=counted)
        release = threading.Event()
        running, waiting = threading.Event(), threading.Event()

        def hold(at: threading.Event) -> None:
            with http.stream("POST", "/v1/completions", json=long) as reply:
                lines = reply.iter_lines()
                if at is running:
                    next(lines)
                at.set()
                release.wait(30)

        threads = [threading.Thread(target=hold, args=(at,)) for at in (running, waiting)]
        for thread, at in zip(threads, (running, waiting), strict=True):
            thread.start()
            assert at.wait(30)
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="tiny", prompt=[5], max_tokens=1500)
        assert caught.value.code == "queue_full"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert len(sent.requests) == 1
        # Room comes only after a second refusal, however slow the machine is.
        sent.at(3, release.set)
        got = client.with_options(max_retries=5).completions.create(model="tiny", prompt=[5], max_tokens=2, seed=1)
        assert got.usage is not None
        assert got.usage.completion_tokens in (1, 2)
        assert len(sent.requests) >= 3, "it was refused at least once more, and came back"
        for thread in threads:
            thread.join()


@pytest.mark.parametrize(
    ("failure", "status", "sends"),
    [
        (EngineFailed("restarting"), 503, 3),
        (OutOfMemory("a step", alone=True), 507, 1),
        (deadline_exceeded(1.0), 504, 1),
    ],
    ids=["transient", "deterministic", "deadline"],
)
async def test_what_is_sent_again_and_what_is_not(failure: Exception, status: int, sends: int) -> None:
    """The error table behind a route that only fails: the client decides by status and headers."""
    app = FastAPI()
    errors.install(app)
    calls = 0

    @app.post("/v1/completions")
    async def fails() -> None:
        nonlocal calls
        calls += 1
        raise failure

    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)  # the HTTP library of openai
    async with httpx2.AsyncClient(transport=transport) as http:
        client = openai.AsyncOpenAI(base_url="http://here/v1", api_key="none", http_client=http)
        with pytest.raises(openai.APIStatusError) as caught:
            await client.completions.create(model="tiny", prompt="a")
    assert (caught.value.status_code, calls) == (status, sends)


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
def test_curl(url: str, http: httpx.Client) -> None:
    body: dict[str, Any] = {"model": "tiny@yarn:4", "prompt": "The 3 ropes", "max_tokens": 8, "temperature": 0}
    command = ["curl", "-sN", f"{url}/v1/completions", "-H", "Content-Type: application/json", "-d"]
    whole = json.loads(subprocess.run([*command, json.dumps(body)], capture_output=True, check=True).stdout)
    assert whole["choices"] == answer(http, **body)["choices"]
    streamed = json.dumps({**body, "stream": True})
    lines = subprocess.run([*command, streamed], capture_output=True, text=True, check=True).stdout.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]
    assert lines[-2:] == ["data: [DONE]", ""]
