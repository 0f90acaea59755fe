"""``min_tokens`` and ``ignore_eos``: where an answer may end, as vLLM has them, on every route that generates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api.generation.text import TextStream
from tests.service.openai.conftest import ENDS, answer, chunks, counts, plain_logprobs

NEW = 24


def eos_of(tiny: Path) -> list[int]:
    return list(json.loads((tiny / "generation_config.json").read_text())["eos_token_id"])


def greedy(tiny: Path, prompt: list[int], *, min_tokens: int = 0, ignore_eos: bool = False) -> tuple[list[int], str]:
    """Tokens from whole passes of the plain model, and why they end."""
    ids, eos = list(prompt), eos_of(tiny)
    for generated in range(NEW):
        row = plain_logprobs(tiny, ids)[-1].clone()
        if generated < min_tokens:
            row[eos] = float("-inf")
        ids.append(int(row.argmax()))
        if ids[-1] in eos and not ignore_eos:
            return ids[len(prompt) :], "stop"
    return ids[len(prompt) :], "length"


def generate(http: httpx.Client, **body: Any) -> dict[str, Any]:
    asked = {"prompt": ENDS, "max_new_tokens": NEW, **body}
    result: dict[str, Any] = answer(http, "/generate", **asked)["results"][0]
    return result


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("min_tokens", [0, 1, 2, 7, NEW])
def test_greedy_tokens(http: httpx.Client, tiny: Path, min_tokens: int, ignore_eos: bool) -> None:
    expected, reason = greedy(tiny, ENDS, min_tokens=min_tokens, ignore_eos=ignore_eos)
    result = generate(http, min_tokens=min_tokens, ignore_eos=ignore_eos)
    assert (result["token_ids"], result["finish_reason"]) == (expected, reason)
    assert result["usage"]["completion_tokens"] == len(expected)
    if min_tokens == 0:
        assert (expected[0] in eos_of(tiny), len(expected)) == (True, NEW if ignore_eos else 1)


def test_sampled_ends_are_held_back(http: httpx.Client, tiny: Path) -> None:
    ends = 0
    for seed in range(20):
        drawing: dict[str, Any] = {"prompt": [5, 6], "temperature": 1.5, "seed": seed}
        free = generate(http, **drawing)["token_ids"]
        bound = generate(http, **drawing, min_tokens=NEW)["token_ids"]
        unaware = generate(http, **drawing, ignore_eos=True)["token_ids"]
        assert len(bound) == len(unaware) == NEW
        assert not set(bound) & set(eos_of(tiny))
        assert unaware[: len(free)] == free
        ends += free[-1] in eos_of(tiny)
    assert ends > 3, "some of them must have ended"


def test_log_probabilities_are_the_models_own(http: httpx.Client, tiny: Path) -> None:
    result = generate(http, min_tokens=3, logprobs=2)
    ids = list(ENDS)
    for entry in result["logprobs"]:
        row = plain_logprobs(tiny, ids)[-1]
        assert entry["logprob"] == pytest.approx(float(row[entry["token_id"]]), abs=1e-4)
        assert [top["token_id"] for top in entry["top"]] == row.topk(2).indices.tolist()
        ids.append(entry["token_id"])
    first = result["logprobs"][0]
    assert first["top"][0]["token_id"] in eos_of(tiny), "held back, and still what the model thinks"
    assert first["token_id"] == first["top"][1]["token_id"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("ends", [{"min_tokens": 5}, {"ignore_eos": True}, {"min_tokens": NEW, "ignore_eos": True}])
def test_a_stream_adds_up_to_the_answer(http: httpx.Client, path: str, ends: dict[str, Any]) -> None:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": ENDS}
    body = {**prompt, **ends, "max_tokens": NEW, "temperature": 0}
    whole = answer(http, path, **body)
    got = chunks(http, path, **body, stream_options={"include_usage": True})
    assert counts(got[-1]["usage"]) == counts(whole["usage"])
    assert whole["usage"]["completion_tokens"] >= (NEW if ends.get("ignore_eos") else 5)
    choices = [choice for chunk in got for choice in chunk["choices"]]
    text = "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)
    choice = whole["choices"][0]
    assert text == (choice["message"]["content"] if "message" in choice else choice["text"])
    assert choices[-1]["finish_reason"] == choice["finish_reason"]


def test_the_one_token_that_scoring_gives(http: httpx.Client, tiny: Path, tokenizer: Any) -> None:
    body: dict[str, Any] = {"prompt": ENDS, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}

    def last(**ends: Any) -> tuple[str, float, str]:
        choice = answer(http, **body, **ends)["choices"][0]
        shown = choice["logprobs"]
        return shown["tokens"][-1], shown["token_logprobs"][-1], choice["finish_reason"]

    row = plain_logprobs(tiny, ENDS)[-1]
    (eos, second) = row.topk(2).indices.tolist()
    ended, held_back, ignored = last(), last(min_tokens=1), last(ignore_eos=True)
    assert ended == (*ignored[:2], "stop")
    assert ignored[2] == "length"
    assert ended[1] == pytest.approx(float(row[eos]), abs=1e-4)
    assert held_back[1] == pytest.approx(float(row[second]), abs=1e-4)
    assert held_back[2] == "length"


def test_stop_strings_wait_for_min_tokens(http: httpx.Client, tokenizer: Any) -> None:
    prompt = tokenizer("The 3 ropes of the")["input_ids"]
    free = generate(http, prompt=prompt, ignore_eos=True)
    for position in (1, 4, 9):
        stop = tokenizer.decode(free["token_ids"][position : position + 1])
        for min_tokens in (0, 3, 8, 15):
            got = generate(http, prompt=prompt, ignore_eos=True, stop=stop, min_tokens=min_tokens)
            expected = ended(free["token_ids"], tokenizer, stop, min_tokens)
            assert (got["text"], got["finish_reason"]) == expected
            body = {"prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
            choice = answer(http, **body, stop=stop, min_tokens=min_tokens)["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == expected


def ended(token_ids: list[int], tokenizer: Any, stop: str, min_tokens: int) -> tuple[str, str]:
    """The text up to the first stop string that ends after the text of ``min_tokens`` tokens, and why it ends."""
    whole = tokenizer.decode(token_ids, skip_special_tokens=True)
    begin = len(tokenizer.decode(token_ids[:min_tokens], skip_special_tokens=True).rstrip("\ufffd"))
    for at in range(len(whole)):
        if whole.startswith(stop, at) and at + len(stop) > begin:
            return whole[:at], "stop"
    return whole, "length"


class Letters:
    """A tokenizer with a letter for a token."""

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return "".join(map(chr, token_ids))

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return chr(token_id)


@given(
    st.text("ab", min_size=1, max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.integers(0, 35),
    st.lists(st.integers(1, 5), max_size=30),
    st.booleans(),
)
def test_any_text_in_any_pieces(text: str, stops: list[str], min_tokens: int, sizes: list[int], kept: bool) -> None:
    """The first piece that completes a stop string ends the text, at the first of those that it completes."""
    stream, shown, at = TextStream(Letters(), stops, min_tokens, with_stop=kept), "", 0
    expected, ended = text, False
    found = [(at, at + len(stop)) for at in range(len(text)) for stop in stops if text.startswith(stop, at)]
    for size in [*sizes, len(text)]:
        at = min(at + size, len(text))
        shown += stream.push([ord(letter) for letter in text[:at]], final=at == len(text))
        complete = [(start, end) for start, end in found if min_tokens < end <= at]
        if complete:
            expected, ended = text[: min(complete)[kept]], True
            break
        assert text.startswith(shown)
    assert (shown, stream.stopped) == (expected, ended)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"prompt": "a", "max_new_tokens": 4}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 4}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_more_than_the_most_is_refused(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    for value, says in ((1 << 20, "must be at most "), (-1, "must be at least 0"), ("x", "must be a whole number")):
        reply = http.post(path, json={**body, "min_tokens": value})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, "min_tokens")
        assert says in error["message"]


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_openai_client(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"model": "tiny", "prompt": ENDS, "max_tokens": NEW, "temperature": 0}

    def tokens(**ends: Any) -> tuple[int, str]:
        got = client.completions.create(**arguments, extra_body=ends)
        assert got.usage is not None
        return got.usage.completion_tokens, got.choices[0].finish_reason

    assert tokens() == (1, "stop")
    assert tokens(ignore_eos=True) == (NEW, "length")
    assert tokens(min_tokens=NEW) == (NEW, "length")
    assert tokens(min_tokens=3)[0] >= 3
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "a"}],
        max_completion_tokens=NEW,
        extra_body={"ignore_eos": True},
    )
    assert chat.usage is not None
    assert chat.usage.completion_tokens == NEW


def test_rulers_clients(http: httpx.Client, tiny: Path, tokenizer: Any) -> None:
    text = tokenizer.decode(ENDS)
    for body in (
        {"prompt": text, "max_tokens": NEW, "temperature": 0, "ignore_eos": True},
        {"text": text, "sampling_params": {"max_new_tokens": NEW, "temperature": 0, "ignore_eos": True}},
    ):
        reply = http.put("/generate", json=body)
        assert reply.status_code == 200, reply.text
        ids = tokenizer(text)["input_ids"]
        expected = tokenizer.decode(greedy(tiny, ids, ignore_eos=True)[0], skip_special_tokens=True)
        assert "".join(reply.json()["text"]) == expected
