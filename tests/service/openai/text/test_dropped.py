"""Messages that a chat template leaves out: only those without a rule are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from service.api.openai.templating import Templating
from service.errors import ApiError
from tests.service.openai.conftest import answer
from tests.service.openai.text.chat_templates import FIRST_LEAD, RULES

CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "tie", "arguments": {}}}
TEXTS: dict[str, dict[str, Any]] = {
    "S": {"role": "system", "content": "Be short."},
    "D": {"role": "developer", "content": " Count turns.\n"},
    "U": {"role": "user", "content": "How many ropes?"},
    "A": {"role": "assistant", "content": "<think>Counting.</think>\n\nThree of them. "},
    "V": {"role": "user", "content": "And knots?"},
    "C": {"role": "assistant", "content": "I count.", "tool_calls": [CALL]},
    "T": {"role": "tool", "content": '{"turns": "4\u00e9"}', "tool_call_id": "abcdefghi"},
}


def conversation(letters: str) -> list[dict[str, Any]]:
    return [dict(TEXTS[letter]) for letter in letters]


def model(tokenizer: Any, template: str) -> Any:
    own = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    own.chat_template = template
    return SimpleNamespace(tokenizer=own, name="own")


@pytest.mark.parametrize("name", RULES)
def test_a_template_that_writes_each_role_is_never_refused(tokenizer: Any, name: str) -> None:
    served = model(tokenizer, RULES[name])
    render = served.tokenizer.apply_chat_template
    letters = ["UA", "UAV", "UCT", "UCTAV"] if name == "the last message" else ["U", "SU", "SUAV", "DUA"]
    if name not in {"Gemma 3", "the last message"}:  # the first has no tools
        letters += ["SUCT", "SUCTA", "SUCTAV", "SUAVCT"]
    for each in letters:
        messages = conversation(each)
        own = [{**message, "role": message["role"].replace("developer", "system")} for message in messages]
        expected = render(own, tokenize=False, add_generation_prompt=True)
        assert Templating().templated(messages, served) == expected, each
    if "cap" not in name and name not in {"upper case", "the last message"}:  # transformers finds no end of theirs
        messages = [*conversation("SU"), {"role": "assistant", "content": "Three of"}]
        open_text = render(messages, tokenize=False, continue_final_message=True)
        assert Templating(continue_final_message=True).templated(messages, served) == open_text


@pytest.mark.parametrize("name", [name for name in RULES if name != "the last message"])
def test_texts_before_a_conversation_are_one_where_one_is_kept(tokenizer: Any, name: str) -> None:
    text = Templating().templated(conversation("SDU"), model(tokenizer, RULES[name])).lower()
    assert "be short." in text
    assert "count turns." in text
    if name in {"Mistral v0.3", "Mistral Nemo", "Gemma 3", "DeepSeek R1 distilled", "gpt-oss"}:
        assert "be short.\n\n count turns." in text


@pytest.mark.parametrize(
    ("template", "letters", "place"),
    [
        (FIRST_LEAD, "UT", 1),
        (FIRST_LEAD, "UD", 1),
        (FIRST_LEAD, "SUDV", 2),
        (FIRST_LEAD, "SDUT", 3),
        (FIRST_LEAD.replace("'system'", "'nobody'"), "SDU", 0),
        (FIRST_LEAD.replace("'system'", "'developer'"), "DSUT", 3),
    ],
)
def test_a_message_without_a_rule_is_refused_by_its_place(
    tokenizer: Any, template: str, letters: str, place: int
) -> None:
    messages = conversation(letters)
    fields = [f"input.{number + 2}" for number in range(len(messages))]
    lost = messages[place]
    for given, field in (((), f"messages.{place}"), (fields, f"input.{place + 2}")):
        with pytest.raises(ApiError) as caught:
            Templating().templated(messages, model(tokenizer, template), "messages", (), given)
        assert caught.value.param == field
        assert caught.value.message.startswith(f"{field}: the model's chat template leaves out")
        assert f"of the role {lost['role']!r}, {lost['content']!r}. Put its text into" in caught.value.message


@pytest.mark.parametrize(
    ("template", "letters", "says"),
    [
        (FIRST_LEAD, "DU", '[S] Count turns.\n[user]"How many ropes?"'),
        (FIRST_LEAD.replace("'system'", "'developer'"), "D", "[S] Count turns.\n"),
        (FIRST_LEAD.replace('"user"', '"developer"'), "D", '[developer]"Count turns."'),
        (FIRST_LEAD, "UC", '[user]"How many ropes?"tie'),
    ],
)
def test_roles_and_calls_are_the_templates(tokenizer: Any, template: str, letters: str, says: str) -> None:
    served = model(tokenizer, template)
    blank = {"role": "tool", "content": " "}
    for messages in (conversation(letters), [*conversation(letters), blank]):
        assert Templating().templated(messages, served) == says


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {"messages": conversation("UD")}, "messages.1"),
        ("/v1/chat/completions", {"messages": conversation("UD")}, "messages.1"),
        ("/v1/responses", {"input": conversation("UD"), "instructions": "Be short."}, "input.1"),
    ],
)
def test_the_field_is_the_clients(parroting: httpx.Client, path: str, body: dict[str, Any], field: str) -> None:
    reply = parroting.post(path, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
    assert "of the role 'developer'" in reply.json()["error"]["message"]
    assert answer(parroting, path, **{**body, field.split(".")[0]: conversation("SDU")})
