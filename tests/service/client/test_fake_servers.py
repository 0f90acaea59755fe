"""Clients beside answers that no server of ours gives, errors as text, and paths of jobs."""

from __future__ import annotations

import json
import re

import httpx
import pytest

from service.client import Ropeway, RopewayError, StreamEvent


def fake(answer: httpx.Response) -> Ropeway:
    return Ropeway("http://fake", transport=httpx.MockTransport(lambda _: answer))


@pytest.mark.parametrize(
    ("answer", "code", "status"),
    [
        (httpx.Response(200, text="<html>hello"), "invalid_answer", 200),
        (httpx.Response(200, json={"models": [{"id": 1}]}), "invalid_answer", 200),
        (httpx.Response(502, text="<html>bad gateway"), None, 502),
        (httpx.Response(307, headers={"Location": "/elsewhere"}), None, 307),
    ],
)
def test_what_is_no_answer_of_a_ropeway_server(answer: httpx.Response, code: str | None, status: int) -> None:
    with fake(answer) as client, pytest.raises(RopewayError) as caught:
        client.models()
    assert (caught.value.code, caught.value.status) == (code, status)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "incomplete_answer"),
        (b'data: {"index": 0, "text": "a\xe2\x80\xa8b", "token_ids": [1]}\n\n', "incomplete_answer"),
        (b"data: [DONE]\n\n", None),
        (b"data: [1]\n\n", "invalid_answer"),
        (b"data: {\n\n", "invalid_answer"),
        (b'data: {"index": 0}\n\n', "invalid_answer"),
        (b'data: {"error": "as text"}\n\n', None),
    ],
)
def test_streams_that_end_badly(content: bytes, code: str | None) -> None:
    answer = httpx.Response(200, headers={"Content-Type": "text/event-stream"}, content=content)
    if content == b"data: [DONE]\n\n":
        with fake(answer) as client:
            assert list(client.stream("a")) == []
            with pytest.raises(RopewayError) as caught:
                client.perplexity("a")
        assert caught.value.code == "incomplete_answer"
        return
    seen: list[StreamEvent] = []
    with fake(answer) as client, pytest.raises(RopewayError) as caught:
        seen.extend(client.stream("a"))
    assert caught.value.code == code
    assert [json.dumps(event.model_dump(exclude_none=True)) for event in seen] == (
        ['{"index": 0, "text": "a\\u2028b", "token_ids": [1]}'] if b"token_ids" in content else []
    )


def test_an_answer_that_is_no_stream() -> None:
    with fake(httpx.Response(200, json={})) as client, pytest.raises(RopewayError) as caught:
        list(client.stream("a"))
    assert caught.value.code == "invalid_answer"


@pytest.mark.parametrize(
    ("param", "message", "text"),
    [
        ("n", "must be at least 1, not 0", "n: must be at least 1, not 0"),
        ("to", "must be up to 4", "to: must be up to 4"),
        ("n", "n: must be at least 1", "n: must be at least 1"),
        ("twice", "'twice' is given twice in an object", "'twice' is given twice in an object"),
        ("pe", "pe.factor: must be at least 1", "pe.factor: must be at least 1"),
        (None, "the server is full", "the server is full"),
    ],
)
def test_the_text_of_an_error_names_its_field_once(param: str | None, message: str, text: str) -> None:
    assert str(RopewayError(message, param=param)) == text


def test_ids_stay_within_their_part_of_the_path() -> None:
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.raw_path.decode())
        return httpx.Response(404, json={"error": {"message": "no such job"}})

    with Ropeway("http://fake", transport=httpx.MockTransport(answer)) as client:
        for ask in (client.job, client.cancel, client.resume, client.units, client.forget, client.result):
            with pytest.raises(RopewayError):
                ask("../a#1")
            with pytest.raises(RopewayError, match="is no id of a job"):
                ask("..")
        with pytest.raises(RopewayError):
            next(iter(client.follow("../a#1")))
    assert all(re.match(r"/jobs/\.\.%2Fa%231([/?]|$)", path) for path in seen)
    assert len(seen) == 7
