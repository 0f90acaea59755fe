"""Structured outputs on every route that generates: greedy answers against our own search, others by their form."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from service.client import Ropeway
from tests.service.openai.conftest import TOO_WIDE, WIDE, answer, chunks, plain_logprobs

PROMPT = [5, 9, 9, 14, 40]
CHAT = {"messages": [{"role": "user", "content": "a rope and a rope"}]}
WORDS = ["anchor", "ant", "rope", "ropes", 'é\n"x"']
DATE = "[0-9]{4}-[01][0-9]"
KNOTS = {
    "type": "object",
    "properties": {"kind": {"enum": ["bowline", "hitch"]}, "turns": {"type": "integer", "minimum": 1, "maximum": 20}},
    "required": ["kind", "turns"],
    "additionalProperties": False,
}


def is_start_of_date(text: str) -> bool:
    return re.fullmatch(DATE, text + "2026-01"[len(text) :]) is not None


def greedy(tiny: Path, tokenizer: Any, is_start: Callable[[str], bool], is_whole: Callable[[str], bool]) -> list[int]:
    """Most likely tokens, each after a whole pass, of those that keep the text a start of a wanted one."""
    ids: list[int] = []
    while 1 not in ids:
        row = plain_logprobs(tiny, PROMPT + ids)[-1]
        text = tokenizer.decode(ids)
        for token in row.argsort(descending=True).tolist():
            more = tokenizer.decode([*ids, token])
            if is_whole(text) if token == 1 else token > 1 and len(more) > len(text) and is_start(more):
                ids.append(token)
                break
        else:
            raise AssertionError(f"nothing follows {text!r}")
    return ids


def generate(http: httpx.Client, **body: Any) -> dict[str, Any]:
    result: dict[str, Any] = answer(http, "/generate", **{"prompt": PROMPT, **body})["results"][0]
    return result


class TestGreedy:
    """ASCII only: the search above reads whole characters."""

    def test_choices(self, http: httpx.Client, tiny: Path, tokenizer: Any) -> None:
        words = WORDS[:4]
        expected = greedy(tiny, tokenizer, lambda text: any(map(text_starts(text), words)), words.__contains__)
        found = generate(http, structured_outputs={"choice": words})
        assert found["token_ids"] == expected
        assert (found["text"], found["finish_reason"]) == (tokenizer.decode(expected[:-1]), "stop")
        assert found["text"] in words

    def test_an_expression(self, http: httpx.Client, tiny: Path, tokenizer: Any) -> None:
        expected = greedy(tiny, tokenizer, is_start_of_date, re.compile(DATE).fullmatch)  # type: ignore[arg-type]
        found = generate(http, structured_outputs={"regex": DATE})
        assert found["token_ids"] == expected

    def test_choices_under_several_encodings(self, http: httpx.Client) -> None:
        body = {"prompt": PROMPT, "pe": ["default", "yarn:4", "self_extend:4"], "structured_outputs": {"choice": WORDS}}
        assert all(result["text"] in WORDS for result in answer(http, "/generate", **body)["results"])


def text_starts(text: str) -> Callable[[str], bool]:
    return lambda word: word.startswith(text)


def is_of_knots(text: str) -> bool:
    found = json.loads(text)
    return found.keys() == {"kind", "turns"} and found["kind"] in {"bowline", "hitch"} and 1 <= found["turns"] <= 20


FORMS: dict[str, tuple[dict[str, Any], Callable[[str], Any]]] = {
    "json": ({"json": KNOTS}, is_of_knots),
    "json as text": ({"json": json.dumps(KNOTS)}, is_of_knots),
    "regex": ({"regex": DATE}, re.compile(DATE).fullmatch),
    "choice": ({"choice": WORDS}, WORDS.__contains__),
}


@pytest.mark.parametrize("form", FORMS)
def test_drawn_answers_have_the_form(http: httpx.Client, form: str) -> None:
    asked, is_right = FORMS[form]
    body = {"prompt": PROMPT, "max_tokens": 200, "temperature": 4.0, "n": 8, "seed": 3, "structured_outputs": asked}
    whole = answer(http, **body)["choices"]
    assert all(is_right(choice["text"]) and choice["finish_reason"] == "stop" for choice in whole)
    assert len({choice["text"] for choice in whole}) > 1
    found = [chunk["choices"][0] for chunk in chunks(http, **body)]
    for index, choice in enumerate(whole):
        assert "".join(piece["text"] for piece in found if piece["index"] == index) == choice["text"]
    chat = answer(http, "/v1/chat/completions", **CHAT, temperature=1.3, max_tokens=200, structured_outputs=asked)
    assert is_right(chat["choices"][0]["message"]["content"])


async def test_requests_of_one_batch_have_each_its_own(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        others = [
            {"repetition_penalty": 1.5, "structured_outputs": {"regex": "[a-c]{12}"}},
            {"temperature": 2.0, "seed": 1, "structured_outputs": {"regex": "[d-f]{12}"}},
            {"structured_outputs": {"choice": WORDS}, "logprobs": 3},
            {},
        ]
        bodies = [{"prompt": PROMPT, "max_new_tokens": 30, **other} for other in others]
        alone = [(await client.post("/generate", json=body)).json()["results"][0]["token_ids"] for body in bodies]
        replies = await asyncio.gather(*(client.post("/generate", json=body) for body in bodies for _ in range(2)))
    crowd = [reply.json()["results"][0]["token_ids"] for reply in replies]
    assert crowd == [ids for ids in alone for _ in range(2)]
    assert len({tuple(ids) for ids in alone}) == 4


def test_logprobs_are_those_of_the_model(http: httpx.Client, tiny: Path) -> None:
    found = generate(http, structured_outputs={"choice": WORDS}, logprobs=1)
    ids = found["token_ids"]
    row = plain_logprobs(tiny, PROMPT + ids)[len(PROMPT) - 1 : -1]
    for at, entry in enumerate(found["logprobs"]):
        assert entry["logprob"] == pytest.approx(float(row[at, ids[at]]), abs=1e-4)
        assert entry["top"][0]["logprob"] == pytest.approx(float(row[at].max()), abs=1e-4)


def test_an_answer_may_end_before_its_form(http: httpx.Client) -> None:
    found = generate(http, max_new_tokens=3, structured_outputs={"regex": "[a-z]{500}"})
    assert (len(found["token_ids"]), found["finish_reason"]) == (3, "length")
    stopped = generate(http, structured_outputs={"regex": "[ab]{50}x"}, stop="a")
    assert stopped["finish_reason"] == "stop"
    assert set(stopped["text"]) <= {"b"}


class Knot(BaseModel):
    kind: Literal["bowline", "hitch"]
    turns: Annotated[int, Field(ge=0, le=9)]


class TestFormatsOfOpenAI:
    def test_a_client_parses_its_own_class(self, url: str) -> None:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            messages: Any = CHAT["messages"]
            schema: Any = {"type": "json_schema", "json_schema": {"name": "knots", "schema": KNOTS, "strict": True}}
            found = client.chat.completions.create(model="tiny", messages=messages, response_format=schema)
            assert is_of_knots(found.choices[0].message.content or "")
            drawn = client.chat.completions.parse(model="tiny", messages=messages, response_format=Knot, temperature=0)
            assert isinstance(drawn.choices[0].message.parsed, Knot)
            response = client.responses.create(
                model="tiny", input="a rope", text={"format": {"type": "json_schema", "name": "knots", "schema": KNOTS}}
            )
            assert is_of_knots(response.output_text)
            assert response.text is not None
            assert response.text.format is not None
            assert response.text.format.type == "json_schema"

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
    def test_any_object(self, http: httpx.Client, path: str) -> None:
        given = CHAT if "chat" in path else {"prompt": PROMPT}
        # Braces are likely here, so that weak models come to an end.
        bias = {str(http.post("/tokenize", json={"prompt": "a}"}).json()["tokens"][-1]): 100}
        (choice,) = answer(
            http, path, **given, max_tokens=60, response_format={"type": "json_object"}, logit_bias=bias
        )["choices"]
        assert isinstance(json.loads(choice.get("text") or choice["message"]["content"]), dict)

    def test_one_greedy_token_behind_scores_follows_it(self, http: httpx.Client) -> None:
        body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
        (choice,) = answer(http, **body, structured_outputs={"regex": "Q+"})["choices"]
        assert choice["text"].endswith("Q")


class TestClient:
    def test_it_has_the_option(self, url: str) -> None:
        with Ropeway(url) as client:
            found = client.generate(PROMPT, structured_outputs={"choice": WORDS}).results[0]
        assert found.text in WORDS


PATTERNS = [{"type": "string", "pattern": f"^(.*a.{{{number}}}|b)$"} for number in range(40)]
LINKS = {f"d{n}": {"type": "array", "items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(900)}
CHAIN = json.dumps({"$ref": "#/$defs/d0", "$defs": {**LINKS, "d900": {}}})

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"structured_outputs": {}}, "structured_outputs", "exactly one of json, json_object, regex, choice, and has none"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "and has regex and choice"),
    ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "did you mean json?"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not valid JSON"),
    ({"structured_outputs": {"json": {"type": "strng"}}}, "structured_outputs.json", "Invalid type: strng"),
    ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json", "not cannot be enforced"),
    ({"structured_outputs": {"json": {"const": 2**53}}}, "structured_outputs.json", "json: const would be rounded"),
    ({"structured_outputs": {"json": {"minItems": 10**20}}}, "structured_outputs.json", "more than 64 bits"),
    ({"structured_outputs": {"json": {"enum": ["x" * 70_000]}}}, "structured_outputs.json", "at most 65536"),
    ({"structured_outputs": {"json": {"allOf": PATTERNS}}}, "structured_outputs.json", "more than 3 seconds"),
    ({"structured_outputs": {"json": CHAIN}}, "structured_outputs.json", "too large to compile"),
    (
        {"structured_outputs": {"json": f'{{"const": 1{"0" * 4300}}}'}},
        "structured_outputs.json",
        "not valid JSON: a number has more than 4300 digits",
    ),
    ({"structured_outputs": {"json": "[" * 60_000}}, "structured_outputs.json", "at most 128 levels"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "exactly one of"),
    ({"structured_outputs": {"regex": "((a{100}){100}){100}"}}, "structured_outputs.regex", "too large to follow"),
    ({"structured_outputs": {"regex": r"[^\s\S]"}}, "structured_outputs.regex", "no text has this form"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "min_tokens", "structured_outputs.regex"),
]


@pytest.mark.parametrize(("body", "param", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_wrong_one_is_refused_by_its_field(
    http: httpx.Client, body: dict[str, Any], param: str, message: str
) -> None:
    for path, given in (("/generate", {"prompt": PROMPT}), ("/v1/chat/completions", CHAT)):
        reply = http.post(path, json={**given, **body})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, param)
        assert message in error["message"]


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("(", "unclosed group"),
        ("a\n(b", "unclosed group"),
        ("a{3,2}", "invalid repetition count range, the start must be <= the end"),
        ("(?=a)b", "look-around, including look-ahead and look-behind, is not supported"),
        (r"\bfoo", r"look-around such as \b is not supported"),
    ],
)
def test_a_refusal_shows_the_expression_and_not_the_grammar(http: httpx.Client, expression: str, reason: str) -> None:
    told = f"the expression '{expression}' is refused: {reason}".replace("\n", "\\n")
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": expression}}, "required": ["a"]}
    for name, form in (("regex", expression), ("json", schema)):
        error = http.post("/generate", json={"prompt": PROMPT, "structured_outputs": {name: form}}).json()["error"]
        param = f"structured_outputs.{name}"
        assert (error["param"], error["message"]) == (param, f"{param}: {told}")


FORMATS_REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "json_schema"}, "response_format.json_schema", "required"),
    ({"type": "xml"}, "response_format", "the type text, json_object or json_schema"),
    (
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "y"}}},
        "response_format.json_schema.schema",
        "Invalid type",
    ),
]


@pytest.mark.parametrize(("given", "param", "message"), FORMATS_REFUSED, ids=lambda value: str(value)[:40])
def test_a_wrong_format_is_refused(http: httpx.Client, given: dict[str, Any], param: str, message: str) -> None:
    reply = http.post("/v1/chat/completions", json={**CHAT, "response_format": given})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert message in error["message"]


def test_two_forms_at_once_are_refused(http: httpx.Client) -> None:
    both = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}
    error = http.post("/v1/chat/completions", json={**CHAT, **both}).json()["error"]
    assert error["message"] == "structured_outputs: not with response_format"


class TestTooMuchWork:
    ASKED: ClassVar = {"prompt": PROMPT, "structured_outputs": {"json": WIDE}}
    """Its second token takes more work than the library allows."""

    def test_it_ends_alone(self, url: str) -> None:
        async def together() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                bodies = [self.ASKED, {"prompt": PROMPT, "structured_outputs": {"choice": WORDS}}, {"prompt": PROMPT}]
                return await asyncio.gather(*(client.post("/generate", json=body) for body in bodies))

        failed, structured, free = asyncio.run(together())
        error = failed.json()["error"]
        assert (failed.status_code, error["code"]) == (400, "grammar_failed")
        assert structured.json()["results"][0]["text"] in WORDS
        assert free.status_code == 200

    def test_a_stream_ends_with_the_error(self, http: httpx.Client) -> None:
        with http.stream("POST", "/generate", json={**self.ASKED, "stream": True}) as reply:
            events = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
        assert events[-1]["error"]["code"] == "grammar_failed"
        assert sum(len(event.get("token_ids", [])) for event in events) == 1, "the token before it came"

    FORMAT: ClassVar = {"type": "json_schema", "name": "a", "schema": WIDE}
    FIELDS: ClassVar[list[tuple[str, str, dict[str, Any], str]]] = [
        ("POST", "/generate", ASKED, "structured_outputs.json"),
        (
            "PUT",
            "/generate",
            {"text": "a", "sampling_params": {"structured_outputs": {"json": WIDE}}},
            "sampling_params.structured_outputs.json",
        ),
        (
            "POST",
            "/v1/chat/completions",
            {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": WIDE}}},
            "response_format.json_schema.schema",
        ),
        ("POST", "/v1/responses", {"input": "a", "text": {"format": FORMAT}}, "text.format.schema"),
    ]

    @pytest.mark.parametrize(("verb", "path", "body", "param"), FIELDS, ids=[field for *_, field in FIELDS])
    def test_the_error_names_the_field_that_was_sent(
        self, http: httpx.Client, verb: str, path: str, body: dict[str, Any], param: str
    ) -> None:
        error = http.request(verb, path, json=body).json()["error"]
        assert (error["param"], error["code"]) == (param, "grammar_failed")
        assert error["message"] == f"{param}: {TOO_WIDE}"


def test_schemas_may_have_many_properties(http: httpx.Client) -> None:
    """An object of ours has at most 256 keys; those of a schema are no fields."""
    properties = {f"p{n}": {"type": "integer"} for n in range(300)}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "wide", "schema": schema}}
    asked: list[dict[str, Any]] = [{"response_format": form}, {"structured_outputs": {"json": schema}}]
    for body in asked:
        answer(http, "/v1/chat/completions", **CHAT, **body, max_tokens=4)
