"""Forms behind reasoning: grammars of answers and of calls, the texts that they take, and their reading."""

from __future__ import annotations

import json

import pytest

from service.api.openai.tools.reading import Call, FormedReader, PlainReader, Said, TemplateReader
from service.api.openai.tools.schemas import MOST_TOOLS
from service.models.text.grammar_parts import Delimiter, behind_reasoning, either, of_calls
from service.models.text.grammar_text import of_choices, of_regex, of_schema, tried
from service.models.text.response_templates import BUILT_IN, LISTINGS, parsing_of
from tests.grammars import follows
from tests.service.conftest import tiny_tokenizer
from tests.service.openai.parrot import TOOLS
from tests.service.openai.text.test_reasoning import SCHEMA

THOUGHT = (Delimiter("<think>"), Delimiter("</think>"))

CALLS = {
    "hermes": (
        '<tool_call>\n{"name": "tie", "arguments": {"knot": "hitch"}}\n</tool_call>',
        '\n<tool_call>{"name": "f", "arguments": {}}</tool_call>',
    ),
    "plain": ('[{"name": "tie", "arguments": {"knot": "hitch"}}]', ', {"name": "f", "arguments": {}}]'),
    "llama3_json": ('{"name": "tie", "parameters": {"knot": "hitch"}}', '; {"name": "f", "parameters": {}}'),
    "mistral": (
        '[TOOL_CALLS] [{"name": "tie", "arguments": {"knot": "hitch"}}]',
        ', {"name": "f", "arguments": {}}]',
    ),
    "mistral_args": ('[TOOL_CALLS]tie[ARGS]{"knot": "hitch"}', "[TOOL_CALLS]f[ARGS]{}"),
}
"""By form: a call, and the text that makes it two."""


def test_every_form_is_here() -> None:
    assert CALLS.keys() == LISTINGS.keys()


@pytest.mark.parametrize("name", CALLS)
def test_calls_follow_their_schemas_and_are_read(name: str) -> None:
    one, two = CALLS[name]
    schemas = {"tie": SCHEMA, "f": {"type": "object"}}
    several, single = (of_calls(schemas, several=each, listing=LISTINGS[name]) for each in (True, False))
    may = either(of_regex("[0-9]{2}"), several)
    more = one.removesuffix("]") + two
    for text in (one, more, "42"):
        assert follows(may, text), text
        assert follows(behind_reasoning(may, *THOUGHT, begun=True), f"so</think>\n{text}")
    for text in (
        one.replace("hitch", "bow"),
        one.replace("tie", "g"),
        f"{one}42",
        f"42{one}",
        "4",
        one[:-1],
        f" {one}",
    ):
        assert not follows(may, text), text
    assert follows(single, one)
    assert not follows(single, more)
    said = read_as(name, more)
    assert [(call.name, json.loads(call.arguments)) for call in said.calls] == [("tie", {"knot": "hitch"}), ("f", {})]
    assert said.text.strip() == ""


def read_as(name: str, text: str) -> Said:
    tokenizer = tiny_tokenizer()
    tokenizer.response_template = BUILT_IN[name]
    listing, reader = LISTINGS[name], TemplateReader(*parsing_of(tokenizer, "", TOOLS))
    formed = FormedReader(PlainReader(), reader, listing.before or listing.opens, ["tie", "f"])
    said = [formed.take(letter, final=False) for letter in text] + [formed.take("", final=True)]
    return Said("".join(each.text for each in said), calls=tuple(call for each in said for call in each.calls))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3_json", '{"name": "Bob", "parameters": {"x": 1}}'),
        ("plain", '[{"name": "Bob", "arguments": {"x": 1}}]'),
        ("plain", '[{"name": "tie", "arguments": {}}, {"name": "Bob", "arguments": {}}]'),
    ],
)
def test_a_form_like_a_call_of_no_function_is_text(name: str, text: str) -> None:
    assert read_as(name, text) == Said(text)


def behind(prompt: str, text: str, size: int) -> Said:
    """The text by a form behind a prompt, in pieces."""
    tokenizer = tiny_tokenizer()
    tokenizer.response_template = BUILT_IN["hermes"]
    thoughts = TemplateReader(*parsing_of(tokenizer, prompt, []))
    reader = FormedReader(
        thoughts, TemplateReader(*parsing_of(tokenizer, "", TOOLS)), LISTINGS["hermes"].opens, ["tie", "f"]
    )
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    said = [reader.take(piece, final=False) for piece in pieces] + [reader.take("", final=True)]
    parts = zip(*((each.text, each.reasoning) for each in said), strict=True)
    return Said(*map("".join, parts), tuple(call for each in said for call in each.calls))


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("", "<think></think>\n\nyes", Said("yes")),
        ("", "<think>a</think>\nyes\n", Said("yes\n", "a")),
        ("", "\n\nyes", Said("\n\nyes")),
        ("<think>", "a</think>\n\nyes", Said("yes", "a")),
        ("<think>\n", "</think>yes", Said("yes")),
        ("", '{"a": "<think>x</think>y"}', Said('{"a": "<think>x</think>y"}')),
        ("", 'a<think>x</think>"y', Said('a<think>x</think>"y')),
        (
            "",
            '<think></think>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>',
            Said(calls=(Call("f", "{}"),)),
        ),
    ],
)
def test_a_form_behind_reasoning_is_read(prompt: str, text: str, expected: Said, size: int) -> None:
    assert behind(f"<|im_start|>assistant\n{prompt}", text, size) == expected


def test_as_many_functions_as_may_be_offered() -> None:
    names = {f"function_{number}": {"type": "object"} for number in range(MOST_TOOLS)}
    for name, (one, _) in CALLS.items():
        grammar = either(of_schema(SCHEMA), of_calls(names, several=True, listing=LISTINGS[name]))
        grammar = behind_reasoning(grammar, *THOUGHT, begun=False)
        call = one.replace("tie", "function_127")
        assert follows(grammar, f"<think>a</think>{call}"), name


@pytest.mark.parametrize("name", ["hermes", "mistral", "mistral_args"])
def test_a_call_inside_a_form_is_text(name: str) -> None:
    inside = CALLS[name][0].replace('"', "'") if name != "mistral_args" else "[TOOL_CALLS]f[ARGS]{}"
    text = '{"note": "' + inside.replace("\n", " ") + '"}'
    assert read_as(name, text) == Said(text)


FORMS = {
    "schema": (of_schema(SCHEMA), '{"knot": "hitch"}'),
    "regex": (of_regex("[a-f]{2}/"), "ab/"),
    "choice": (of_choices(["yes", "no"]), "no"),
    "calls": (
        of_calls({"f": {"type": "object", "additionalProperties": False}}, several=True),
        '[{"name": "f", "arguments": {}}]',
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_any_form_is_found_behind_reasoning(form: str) -> None:
    grammar, right = FORMS[form]
    may = behind_reasoning(grammar, *THOUGHT, begun=False)
    for text in (right, f"<think>a </th {right} é</think>\n\n{right}", f"<think></think>{right}"):
        assert follows(may, text), text
    for text in (
        f"a{right}",
        f"{right}a",
        f"<think>{right}",
        f"<think>a</think>b{right}",
        f"</think>{right}",
        f"\n{right}",
    ):
        assert not follows(may, text), text
    begun = behind_reasoning(grammar, *THOUGHT, begun=True)
    assert follows(begun, f"so it is</think>\n{right}")
    assert not follows(begun, right)
    assert not follows(begun, f"a</think><think>b</think>{right}")


def test_a_trial_goes_behind_reasoning() -> None:
    """The library refuses more than 2000 items at once, and adds some."""
    grammar = behind_reasoning(of_choices([f"{number}." for number in range(1999)]), *THOUGHT, begun=False)
    assert "2000" in tried(grammar, "<think>.</think>")
    small = behind_reasoning(of_choices(["yes", "no"]), *THOUGHT, begun=False)
    assert tried(small, "<think>.</think>") == ""
