"""``/v1/messages`` by the ``anthropic`` package: the same texts as from chats."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from service.api.anthropic.blocks import Turn, conversation_of
from tests.service.openai.conftest import answer, counts

ASK: list[Any] = [{"role": "user", "content": "The 3 ropes?"}]
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="k", max_retries=0, _strict_response_validation=True) as client:
        yield client


def message(client: anthropic.Anthropic, messages: list[Any] = ASK, **fields: Any) -> anthropic.types.Message:
    extra = {**GREEDY, **fields.pop("extra_body", {})}
    asked = {"model": "tiny", "max_tokens": 12, **fields}
    found: anthropic.types.Message = client.messages.create(messages=messages, extra_body=extra, **asked)
    return found


def text(client: anthropic.Anthropic, messages: list[Any] = ASK, **fields: Any) -> str:
    (block,) = message(client, messages, **fields).content
    assert block.type == "text"
    return block.text


def chat(http: httpx.Client, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return answer(http, "/v1/chat/completions", messages=messages, max_tokens=12, **GREEDY, **fields)


def test_it_answers_as_a_chat_does(client: anthropic.Anthropic, http: httpx.Client) -> None:
    whole = client.messages.with_raw_response.create(
        model="tiny@ntk:2", system="Be short.", messages=ASK, max_tokens=12, extra_body=GREEDY
    )
    got = whole.parse()
    same = chat(http, [{"role": "system", "content": "Be short."}, *ASK], model="tiny@ntk:2")
    choice = same["choices"][0]
    assert [block.model_dump(exclude_none=True) for block in got.content] == [
        {"type": "text", "text": choice["message"]["content"]}
    ]
    assert ((got.model_extra or {})["pe"], got.model) == (choice["pe"], "tiny@ntk:2")
    read = got.usage.input_tokens + (got.usage.cache_read_input_tokens or 0)
    assert (read, got.usage.output_tokens) == tuple(list(counts(same["usage"]).values())[:2])
    assert (got.stop_reason, got.stop_sequence) == ("max_tokens", None)
    assert whole.headers["request-id"] == whole.headers["x-request-id"]


def test_tokens_of_the_cache_are_no_input_tokens(client: anthropic.Anthropic) -> None:
    long = [{"role": "user", "content": "Ropes and knots. " * 40}]
    total = client.messages.count_tokens(model="tiny", messages=long).input_tokens
    first, second = message(client, long).usage, message(client, long).usage
    assert first.input_tokens == total
    assert second.cache_read_input_tokens
    assert second.input_tokens + second.cache_read_input_tokens == total


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    whole = text(client)
    letter = next(letter for letter in whole[2:] if letter.strip())
    got = message(client, stop_sequences=["never in it", letter])
    assert (got.stop_reason, got.stop_sequence) == ("stop_sequence", letter)
    assert [block.text for block in got.content if block.type == "text"] == [whole[: whole.index(letter)]]


def test_an_end_of_the_text_is_the_end_of_the_turn(client: anthropic.Anthropic) -> None:
    biased = {"ignore_eos": False, "logit_bias": {"1": 100}}
    got = message(client, extra_body=biased)
    assert (got.stop_reason, got.content) == ("end_turn", [])


def test_a_stream_adds_up_to_the_answer(client: anthropic.Anthropic) -> None:
    whole = text(client)
    with client.messages.stream(model="tiny", messages=ASK, max_tokens=12, extra_body=GREEDY) as stream:
        kinds = [event.type for event in stream if event.type != "text"]
        last = stream.get_final_message()
    deltas = kinds.count("content_block_delta")
    assert deltas > 2
    assert kinds == [
        *("message_start", "content_block_start"),
        *["content_block_delta"] * deltas,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert [block.text for block in last.content if block.type == "text"] == [whole]
    assert (last.stop_reason, last.usage.output_tokens) == ("max_tokens", 12)
    assert (last.model_extra or {})["pe"]["method"] == "default"


def test_a_stream_ends_without_a_mark_of_openai(http: httpx.Client) -> None:
    body = {"messages": ASK, "max_tokens": 4, "stream": True}
    sent = http.post("/v1/messages", json=body).text
    assert sent.rstrip().splitlines()[-1] == 'data: {"type": "message_stop"}'


def test_the_last_text_of_the_assistant_goes_on(client: anthropic.Anthropic, http: httpx.Client) -> None:
    begun = [*ASK, {"role": "assistant", "content": [{"type": "text", "text": "All"}]}]
    plain = [*ASK, {"role": "assistant", "content": "All"}]
    same = chat(http, plain, continue_final_message=True)
    assert text(client, begun) == same["choices"][0]["message"]["content"]
    ended = chat(http, plain)
    for nothing in ("", [], [{"type": "text", "text": ""}]):
        assert text(client, [*ASK, {"role": "assistant", "content": nothing}]) == text(client)
    closed = {"add_generation_prompt": True}
    assert text(client, begun, extra_body=closed) == ended["choices"][0]["message"]["content"]


def test_an_answer_goes_back_as_the_client_stores_it(client: anthropic.Anthropic, http: httpx.Client) -> None:
    first = message(client)
    history = [*ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": "And 4?"}]
    said = "".join(block.text for block in first.content if block.type == "text")
    plain = [*ASK, {"role": "assistant", "content": said}, {"role": "user", "content": "And 4?"}]
    assert text(client, history) == chat(http, plain)["choices"][0]["message"]["content"]


def test_turns_of_one_role_are_one_message() -> None:
    texts = [{"type": "text", "text": "Tie ", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "it."}]
    call = {"type": "tool_use", "id": "t1", "name": "tie", "input": {"knot": "hitch"}}
    turns = [
        {"role": "user", "content": texts},
        {"role": "user", "content": "Now."},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Yes"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "."}, call]},
        {"role": "assistant", "content": []},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": texts, "is_error": True}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t2"}, {"type": "text", "text": "Go on."}]},
    ]
    function = {"name": "tie", "arguments": {"knot": "hitch"}}
    calls = [{"id": "t1", "type": "function", "function": function}]
    messages, places = conversation_of([Turn.model_validate(turn) for turn in turns])
    assert messages == [
        {"role": "user", "content": "Tie it.\nNow."},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t1", "content": "Tie it."},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
        {"role": "user", "content": "Go on."},
    ]
    assert places == [0, 2, 6, 7, 7]


def test_a_count_is_that_of_the_answer(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "tiny@ntk:2", "messages": ASK, "system": [{"type": "text", "text": "Be short."}]}
    got = client.messages.create(max_tokens=2, **asked).usage
    total = got.input_tokens + (got.cache_read_input_tokens or 0)
    assert client.messages.count_tokens(**asked).input_tokens == total


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": None}, "max_tokens", "required"),
    ({"stop": "x"}, "stop", "stop_sequences does it"),
    ({"top_k": 2, "betas": ["x"]}, "betas", "not supported"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "'user', 'assistant'"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.type", "no images"),
    (
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
        "messages.0.content.0.type",
        "the role user has blocks of text and tool_result",
    ),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0", "a block with its type"),
    ({"messages": [{"role": "user", "content": 4}]}, "messages.0.content", "must be a text or a list of blocks, not 4"),
    ({"system": 4}, "system", "must be a text or a list of blocks, not 4"),
    ({"system": [{"type": "image"}]}, "system.0.type", "no images"),
    ({"context_management": {"edits": [{"type": "x"}]}}, "context_management", "leave it out (or send {})"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type", "'custom'"),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "must be one of the tools: none is given"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "thinking", "does not reason"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort", "'low'"),
    ({"system": "Be short.", "max_tokens": 5000}, "max_tokens", "may be at most 1024"),
]


@pytest.mark.parametrize(("fields", "param", "says"), REFUSED, ids=[row[1] for row in REFUSED])
def test_a_refusal_has_the_form_of_the_api(
    client: anthropic.Anthropic, fields: dict[str, Any], param: str, says: str
) -> None:
    body = {"messages": ASK, "max_tokens": 4, **fields}
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.post("/v1/messages", body=body, cast_to=object)
    error = caught.value
    assert (error.type, error.body["error"]["param"]) == ("invalid_request_error", param)  # type: ignore[index]
    assert says in (error.api_message or "")
    assert error.request_id == error.body["request_id"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("words", "most", "says"),
    [
        (5000, 4, r"^prompt is too long: \d+ tokens > 4096 maximum$"),
        (3500, 1000, r"^input length and `max_tokens` exceed context limit: \d+ \+ 1000 > 4096$"),
    ],
)
def test_a_conversation_that_is_too_long_is_known_as_such(
    client: anthropic.Anthropic, words: int, most: int, says: str
) -> None:
    """By these words, clients shorten it."""
    messages: list[Any] = [{"role": "user", "content": "a " * words}]
    with pytest.raises(anthropic.BadRequestError) as caught:
        message(client, messages, max_tokens=most)
    assert re.match(says, caught.value.api_message or "")


def test_values_that_ask_for_nothing_pass(client: anthropic.Anthropic) -> None:
    """Claude Code sends them."""
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    fields = {"context_management": {"edits": edits}, "speed": "standard", "system": []}
    assert text(client, extra_body=fields) == text(client)


def test_a_client_goes_on_without_a_thread(client: anthropic.Anthropic) -> None:
    @anthropic.beta_tool
    def tie(knot: str) -> str:
        """Tie a knot."""
        return knot

    runner = client.beta.messages.tool_runner(model="tiny", max_tokens=4, messages=ASK, tools=[tie])
    with pytest.raises(anthropic.BadRequestError, match="unknown form"):
        runner.until_done()


@pytest.mark.parametrize(("path", "status"), [("/v1/messages/batches", 404), ("/v1/messages", 405)])
def test_failures_before_the_route_have_the_form_too(http: httpx.Client, path: str, status: int) -> None:
    found = http.get(path)
    assert (found.status_code, found.json()["type"]) == (status, "error")
    assert found.json()["request_id"] == found.headers["request-id"]
    assert "type" not in http.get("/v1/nothing").json()


def test_an_unknown_model_is_not_found(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        message(client, model="claude")
    assert caught.value.type == "not_found_error"


def test_a_stream_that_fails_says_so(client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"model": "tiny", "messages": ASK, "max_tokens": 900}
    with (
        pytest.raises(anthropic.APIStatusError) as caught,
        client.messages.stream(**asked, extra_body={**GREEDY, "timeout_s": 0.2}) as stream,
    ):
        list(stream)
    assert (caught.value.body["error"]["code"], caught.value.type) == ("deadline_exceeded", "timeout_error")  # type: ignore[index]
