"""``Ropeway`` and ``AsyncRopeway`` against the live server: typed answers, streams, progress, errors."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from patches import METHODS
from service.client import (
    AsyncRopeway,
    PrefillProgress,
    Progress,
    ResultEnd,
    Ropeway,
    RopewayError,
    StreamEvent,
    TextDelta,
)
from service.client.requests import PerplexityOptions
from service.engine.engine import Engine
from service.engine.failures import EngineFailed
from service.engine.generation import Generation
from service.evaluation.perplexity.request import PerplexityRequest
from tests.service.conftest import TEXT
from tests.service.serving import until, wait_for

ROOT = Path(__file__).resolve().parents[3]
YARN: dict[str, Any] = {"method": "yarn", "factor": 4}
LONG = [5, 6, 7]
"""A prompt that the tiny model goes on from for hundreds of tokens."""


@pytest.fixture
def ropeway(server: str) -> Iterator[Ropeway]:
    with Ropeway(server) as client:
        yield client


@pytest.fixture
async def asynchronous(server: str) -> AsyncIterator[AsyncRopeway]:
    async with AsyncRopeway(server) as client:
        yield client


def aborted(server: str) -> float:
    """Sequences of the tiny model that were given up."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(httpx.get(f"{server}/metrics").text)
        for sample in family.samples
        if sample.name == "ropeway_request_success_total" and sample.labels["finished_reason"] == "abort"
    )


def text_of(events: list[StreamEvent], index: int) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta) and event.index == index)


def test_importing_it_loads_no_model_library() -> None:
    heavy = {"torch", "transformers", "fastapi", "numpy", "matplotlib", "patches"}
    code = f"import sys, service.client; print(sorted({heavy} & set(sys.modules)))"
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "[]"


class TestGenerate:
    def test_one_prompt_as_the_route_answers_it(self, ropeway: Ropeway, client: httpx.Client) -> None:
        answer = ropeway.generate(TEXT[:80], pe=YARN, max_new_tokens=8, temperature=1.0, seed=3, logprobs=2)
        body = {"prompt": TEXT[:80], "pe": YARN, "max_new_tokens": 8, "temperature": 1.0, "seed": 3, "logprobs": 2}
        raw = client.post("/generate", json=body).json()
        for result in (sent := answer.model_dump())["results"] + raw["results"]:
            del result["timings"]
        assert sent == raw
        assert answer.results[0].logprobs is not None
        assert len(answer.results[0].logprobs[0].top) == 2

    def test_the_short_form_is_the_same_encoding(self, ropeway: Ropeway) -> None:
        short, long = (ropeway.generate("The", pe=pe, max_new_tokens=4).results[0] for pe in ("yarn:4", YARN))
        assert (short.text, short.pe) == (long.text, long.pe)

    def test_many_prompts_under_many_encodings(self, ropeway: Ropeway) -> None:
        prompts: list[str | list[int]] = ["The 3", [5, 6, 7]]
        answer = ropeway.generate(prompts, pe=["default", YARN, "self_extend"], max_new_tokens=4)
        assert [result.prompt_index for result in answer.results] == [0, 0, 0, 1, 1, 1]
        assert [result.pe["requested"] for result in answer.results[:3]] == ["default", "yarn", "self_extend"]
        assert answer.usage.completion_tokens == sum(result.usage.completion_tokens for result in answer.results)

    def test_what_is_none_is_not_sent(self, ropeway: Ropeway) -> None:
        assert ropeway.generate("The", pe=None, max_new_tokens=2, stop=None, model=None).results[0].pe


class TestStream:
    def test_adds_up_to_the_answer(self, ropeway: Ropeway) -> None:
        request: dict[str, Any] = {"prompt": TEXT[:600], "pe": ["default", "ntk:2"], "max_new_tokens": 12}
        events = list(ropeway.stream(**request))
        whole = ropeway.generate(**request)
        for result in whole.results:
            deltas = [event for event in events if isinstance(event, TextDelta) and event.index == result.index]
            assert "".join(delta.text for delta in deltas) == result.text
            assert [token for delta in deltas for token in delta.token_ids] == result.token_ids
        ends = [event for event in events if isinstance(event, ResultEnd)]
        assert {end.index: end.pe for end in ends} == {result.index: result.pe for result in whole.results}

    def test_tells_how_much_of_a_long_prompt_has_been_read(self, ropeway: Ropeway) -> None:
        events = list(ropeway.stream([9, 8, 7] * 200, pe="linear:16", max_new_tokens=2))
        read = [event.prompt_tokens_done for event in events if isinstance(event, PrefillProgress)]
        assert len(read) >= 3
        assert read == sorted(read)
        assert {event.prompt_tokens_total for event in events if isinstance(event, PrefillProgress)} == {600}

    def test_closing_it_early_ends_the_work(self, ropeway: Ropeway, server: str) -> None:
        before = aborted(server)
        events = ropeway.stream(LONG, max_new_tokens=1000)
        assert isinstance(next(events), TextDelta)
        events.close()
        wait_for(lambda: aborted(server) == before + 1)
        wait_for(lambda: ropeway.health().models["tiny"]["running"] == 0)

    def test_an_error_after_the_first_tokens_is_raised_and_not_tried_again(
        self, ropeway: Ropeway, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        starts = break_after(4, monkeypatch)
        seen: list[StreamEvent] = []
        with pytest.raises(RopewayError, match="broken on purpose") as caught:
            seen.extend(ropeway.stream(LONG, max_new_tokens=20))
        assert (caught.value.status, caught.value.code) == (None, "engine_failed")
        assert caught.value.request_id
        assert sum(len(event.token_ids) for event in seen if isinstance(event, TextDelta)) == 4
        assert len(starts) == 1


def break_after(tokens: int, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Lets every generation fail after so many tokens; the list has one entry for each that has begun."""
    whole = Engine.generate
    starts: list[None] = []

    async def breaks(self: Engine, *args: Any, **kwargs: Any) -> AsyncIterator[Generation]:
        starts.append(None)
        async with aclosing(whole(self, *args, **kwargs)) as steps:
            async for generation in steps:
                yield generation
                if len(generation.token_ids) == tokens:
                    raise EngineFailed("broken on purpose")

    monkeypatch.setattr(Engine, "generate", breaks)
    return starts


class TestPerplexity:
    def test_gives_the_routes_numbers_and_its_progress(self, ropeway: Ropeway, client: httpx.Client) -> None:
        progress: list[Progress] = []
        ntk = {"method": "ntk", "factor": 2}
        result = ropeway.perplexity(TEXT[:900], methods=["default", ntk], lengths=[32, 64], on_progress=progress.append)
        body = {"input": TEXT[:900], "methods": [{"method": "default"}, ntk], "lengths": [32, 64]}
        raw = client.post("/perplexity", json=body).json()
        numbers = [[at_length.perplexity for at_length in method.lengths] for method in result.methods]
        assert numbers == [[at_length["perplexity"] for at_length in method["lengths"]] for method in raw["methods"]]
        assert progress[-1].tokens_done == progress[-1].tokens_total
        assert client.get(result.links["csv"]).status_code == 200

    def test_one_method_and_the_servers_own_document(self, ropeway: Ropeway) -> None:
        result = ropeway.perplexity(methods="yarn:2", lengths=[64])
        assert [document.name for document in result.documents] == ["persuasion"]
        assert [method.pe["requested"] for method in result.methods] == ["yarn"]

    def test_options_take_effect(self, ropeway: Ropeway) -> None:
        result = ropeway.perplexity(
            [[5, 6, 7] * 30], lengths={"start": 16, "stop": 32, "step": 16}, protocol="disjoint"
        )
        assert (result.protocol, result.lengths) == ("disjoint", [16, 32])


class TestSearch:
    FIELDS: ClassVar[dict[str, Any]] = {"windows": 2, "held_out": 3, "population": 4, "generations": 2}

    def test_gives_the_routes_numbers_and_its_progress(self, ropeway: Ropeway, client: httpx.Client) -> None:
        progress: list[Progress] = []
        result = ropeway.search(128, TEXT, methods="ntk:2", on_progress=progress.append, **self.FIELDS)
        body = {"length": 128, "input": TEXT, "methods": "ntk:2", **self.FIELDS}
        raw = client.post("/search", json=body).json()
        assert (result.pe, result.answer.words) == (raw["pe"], raw["answer"]["words"])
        assert [method.label for method in result.methods] == ["search", "default", "ntk(factor=2)"]
        assert progress[-1].label == "ntk(factor=2)"
        assert ropeway.generate("The", pe=result.pe, max_new_tokens=2).results[0].text

    async def test_asynchronously(self, asynchronous: AsyncRopeway) -> None:
        result = await asynchronous.search(128, TEXT, **self.FIELDS)
        assert len(result.generations) == 2
        with pytest.raises(RopewayError) as caught:
            await asynchronous.search(64, TEXT, **self.FIELDS)
        assert (caught.value.status, caught.value.param) == (400, "length")


class TestListings:
    def test_methods_models_and_health(self, ropeway: Ropeway) -> None:
        assert [method.method for method in ropeway.methods()] == list(METHODS)
        assert ropeway.method("yarn").parameters["properties"].keys() == METHODS["yarn"].model_fields.keys()
        with pytest.raises(RopewayError, match="did you mean yarn"):
            ropeway.method("yrn")
        assert [model.id for model in ropeway.models() if model.default] == ["tiny"]
        assert ropeway.health().status == "ok"


class TestErrors:
    def test_a_refusal_has_the_servers_words(self, ropeway: Ropeway) -> None:
        with pytest.raises(RopewayError) as caught:
            ropeway.generate("a", pe={"method": "yarn", "factor": 0})
        error = caught.value
        assert (error.status, error.code, error.param) == (400, "invalid_request", "pe.factor")
        assert error.message in str(error)
        assert (error.retry_after, error.transient) == (None, False)
        assert error.request_id

    def test_a_stream_is_refused_before_its_first_event(self, ropeway: Ropeway) -> None:
        with pytest.raises(RopewayError) as caught:
            next(ropeway.stream([5] * 4090, max_new_tokens=100))
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
        with pytest.raises(RopewayError) as caught:
            ropeway.perplexity("a text", lengths=[10**6])
        assert (caught.value.status, caught.value.param) == (400, "lengths")

    def test_an_option_that_the_server_does_not_know_is_refused(self, ropeway: Ropeway) -> None:
        options: Any = {"unheard_of": 1}
        with pytest.raises(RopewayError) as caught:
            ropeway.generate("a", **options)
        assert (caught.value.status, caught.value.param) == (400, "unheard_of")

    def test_a_short_form_that_is_none_is_refused(self, ropeway: Ropeway) -> None:
        with pytest.raises(RopewayError, match=r"unknown method 'yrn': did you mean yarn\?") as caught:
            next(ropeway.stream("a", pe="yrn:4"))
        assert (caught.value.status, caught.value.param) == (400, "pe")

    def test_an_address_that_is_none(self) -> None:
        for url in ("http://[", "nonsense://host"):
            with pytest.raises(RopewayError) as caught, Ropeway(url) as client:
                client.models()
            assert caught.value.code == "connection_error"

    def test_time_that_is_up(self, server: str) -> None:
        with Ropeway(server, timeout=0.2) as client, pytest.raises(RopewayError) as caught:
            client.generate(LONG, max_new_tokens=1000)
        assert (caught.value.code, caught.value.status) == ("timeout", None)


class TestAsync:
    async def test_many_at_once_equal_each_alone(self, asynchronous: AsyncRopeway, ropeway: Ropeway) -> None:
        encodings = ["default", "linear:2", "yarn:4", "self_extend"]

        async def streamed(pe: str) -> str:
            return text_of([event async for event in asynchronous.stream(TEXT[:80], pe=pe, max_new_tokens=8)], 0)

        texts = await asyncio.gather(*map(streamed, encodings))
        answers = await asyncio.gather(*(asynchronous.generate(TEXT[:80], pe=pe, max_new_tokens=8) for pe in encodings))
        assert texts == [answer.results[0].text for answer in answers]
        assert texts[2] == ropeway.generate(TEXT[:80], pe="yarn:4", max_new_tokens=8).results[0].text

    async def test_perplexity_and_listings(self, asynchronous: AsyncRopeway) -> None:
        progress: list[Progress] = []
        result = await asynchronous.perplexity(TEXT[:900], methods="ntk:2", lengths=[32], on_progress=progress.append)
        assert result.methods[0].lengths[0].tokens_scored > 0
        assert progress[-1].tokens_done == progress[-1].tokens_total
        assert [method.method for method in await asynchronous.methods()] == list(METHODS)
        assert await asynchronous.method("yarn") in await asynchronous.methods()
        assert [model.id for model in await asynchronous.models() if model.default] == ["tiny"]
        assert (await asynchronous.health()).status == "ok"

    async def test_closing_a_stream_early_ends_the_work(self, asynchronous: AsyncRopeway, server: str) -> None:
        before = aborted(server)
        async with aclosing(asynchronous.stream(LONG, max_new_tokens=1000)) as events:
            assert isinstance(await anext(events), TextDelta)
        await until(lambda: aborted(server) == before + 1)

    async def test_errors(self, asynchronous: AsyncRopeway, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(RopewayError) as caught:
            await asynchronous.generate("a", temperature=-1)
        assert (caught.value.status, caught.value.param) == (400, "temperature")
        with pytest.raises(RopewayError) as caught:
            await anext(asynchronous.stream("a", model="nobody"))
        assert (caught.value.status, caught.value.code) == (404, "model_not_found")
        break_after(2, monkeypatch)
        with pytest.raises(RopewayError, match="broken on purpose"):
            [event async for event in asynchronous.stream(LONG, max_new_tokens=20)]


class TestBodies:
    """Errors of a body that JSON cannot have are ``RopewayError`` too."""

    @pytest.mark.parametrize(
        ("body", "field", "at"),
        [
            ({"prompt": "x\ud800"}, "prompt", 2),
            ({"prompt": ("x", "\ud800")}, "prompt.1", 1),
            ({"prompt": "x", "stop": ["日本\udce9"]}, "stop.0", 3),
        ],
    )
    async def test_half_a_surrogate_pair_is_named(self, body: dict[str, Any], field: str, at: int) -> None:
        with Ropeway("http://127.0.0.1:9") as client, pytest.raises(RopewayError) as caught:
            client.generate(**body)
        assert str(caught.value) == f"{field}: character {at} is half a surrogate pair"
        assert (caught.value.code, caught.value.param) == ("invalid_request", field)
        async with AsyncRopeway("http://127.0.0.1:9") as client:
            with pytest.raises(RopewayError) as again:
                await client.generate(**body)
        assert str(again.value) == str(caught.value)

    @pytest.mark.parametrize(("prompt", "fields"), [("x", {"temperature": float("nan")}), ({1, 2}, {})])
    def test_no_json(self, prompt: Any, fields: dict[str, Any]) -> None:
        with (
            Ropeway("http://127.0.0.1:9") as client,
            pytest.raises(RopewayError, match="cannot be written") as raised,
        ):
            client.generate(prompt, **fields)
        assert raised.value.code == "invalid_request"

    def test_the_options_of_perplexity_are_its_fields(self) -> None:
        elsewhere = {"evaluation", "input", "methods", "stream", "background", "reuse"}
        assert PerplexityOptions.__annotations__.keys() == PerplexityRequest.model_fields.keys() - elsewhere
