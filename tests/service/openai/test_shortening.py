"""``truncation`` of responses: the beginning of a conversation goes until prompt and answer fit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api.openai.shortening import shortened
from service.errors import ApiError, bad_request
from tests.service.openai.conftest import answer

PATH = "/v1/responses"
CONTEXT = 4096
TURNS: list[Any] = [
    {"role": "user" if turn % 2 == 0 else "assistant", "content": f"{turn} " + "a b " * (20 * turn)}
    for turn in range(15)
]
ASKED: dict[str, Any] = {"instructions": "Be short.", "max_output_tokens": 200, "temperature": 0}


def tokens_of(http: httpx.Client, first: int) -> int:
    messages = [{"role": "system", "content": "Be short."}, *TURNS[first:]]
    return int(answer(http, "/tokenize", messages=messages)["count"])


def test_the_beginning_goes_until_it_fits(http: httpx.Client) -> None:
    first = next(first for first in range(len(TURNS)) if tokens_of(http, first) + 200 <= CONTEXT)
    assert 2 < first < len(TURNS) - 1
    got = answer(http, PATH, **ASKED, input=TURNS, truncation="auto")
    assert (got["usage"]["input_tokens"], got["truncation"]) == (tokens_of(http, first), "auto")
    same = answer(http, PATH, **ASKED, input=TURNS[first:])
    assert (got["output"][0]["content"], same["truncation"]) == (same["output"][0]["content"], "disabled")
    refused = http.post(PATH, json={**ASKED, "input": TURNS}).json()["error"]
    assert refused["code"] == "context_length_exceeded"
    assert refused["n_prompt_tokens"] == tokens_of(http, 0)


def test_one_that_fits_stays(http: httpx.Client) -> None:
    body = {**ASKED, "input": TURNS[8:12]}
    found = [answer(http, PATH, **body, truncation=truncation) for truncation in ("auto", "disabled")]
    assert found[0]["usage"]["input_tokens"] == found[1]["usage"]["input_tokens"]
    assert found[0]["output"][0]["content"] == found[1]["output"][0]["content"]


def test_an_answer_without_a_limit_has_room(http: httpx.Client) -> None:
    """The server gives 1,024 tokens, which are a quarter of the context too."""
    asked = {"input": TURNS, "truncation": "auto", "stop": ["e"], "instructions": "Be short."}
    used = answer(http, PATH, **asked)["usage"]["input_tokens"]
    first = next(first for first in range(len(TURNS)) if tokens_of(http, first) + 1024 <= CONTEXT)
    assert used == tokens_of(http, first)
    almost = [*TURNS[:2], {"role": "user", "content": "a b " * 1100}]
    kept = answer(http, PATH, input=almost, truncation="auto", stop=["e"])["usage"]["input_tokens"]
    assert CONTEXT - 1024 < kept == answer(http, "/tokenize", messages=almost)["count"] < CONTEXT


def test_the_last_message_stays(http: httpx.Client) -> None:
    for given_input in ("a b " * 3000, [*TURNS[:4], {"role": "user", "content": "a b " * 3000}]):
        error = http.post(PATH, json={**ASKED, "input": given_input, "truncation": "auto"}).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    reply = http.post(PATH, json={"input": "a", "truncation": "some"})
    assert reply.json()["error"]["param"] == "truncation"


ROLES = st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), min_size=1, max_size=30)


@given(ROLES, st.integers(0, 40), st.booleans())
async def test_any_conversation(roles: list[str], room: int, strict: bool) -> None:
    """Each message is a token. A strict template takes a conversation that a user begins."""
    lead = next((at for at, role in enumerate(roles) if role != "system"), len(roles))

    async def write(places: Iterable[int]) -> str:
        kept = list(places)
        if strict and roles[kept[lead]] != "user":
            raise bad_request("messages: a user must begin", "messages")
        return ",".join(map(str, kept))

    async def count(text: str) -> float:
        return len(text.split(","))

    def may_begin(at: int) -> bool:
        return roles[at] == "user" if strict else roles[at] != "tool"

    starts = [at for at in range(lead + 1, len(roles)) if may_begin(at)]
    try:
        text = await shortened(roles, write, count, room)
    except ApiError:
        assert strict
        assert not starts
        return
    if text is None:
        assert not any(role != "tool" for role in roles[lead + 1 :])
        return
    found = [int(place) for place in text.split(",")]
    start = found[lead]
    assert found == [*range(lead), *range(start, len(roles))]
    assert may_begin(start)
    fitting = [at for at in starts if lead + len(roles) - at <= room]
    assert start == (fitting[0] if fitting else starts[-1])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_other_routes_have_it_not(http: httpx.Client, path: str) -> None:
    body: dict[str, Any] = {"messages": TURNS[:1]} if "chat" in path else {"prompt": "a"}
    assert "truncation" in http.post(path, json={**body, "truncation": "auto"}).json()["error"]["param"]
