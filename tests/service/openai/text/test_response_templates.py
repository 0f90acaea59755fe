"""Response templates: built-in ones read answers in any pieces, no text is lost, and chat templates name them."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest
from transformers import AutoTokenizer

from service.api.openai.tools.reading import Call, Said, TemplateReader
from service.models.text.chat import PLAIN
from service.models.text.response_templates import BUILT_IN, parsing_of, use_response_template
from tests.service.conftest import tiny_tokenizer
from tests.service.openai.parrot import TOOLS
from tests.service.openai.structure.test_tools import HITCH

ANSWERS: dict[str, tuple[str, str, str, str]] = {
    "hermes": (
        "<|im_start|>assistant\n<think>\n",
        'Hm.\n</think>\n\nSo:\n<tool_call>\n{"name": "tie", "arguments": {"knot": "hitch", "wet": true}}\n</tool_call>'
        '\n<tool_call>\n{"name": "count", "arguments": {}}\n</tool_call>',
        "\n\nSo:",
        "Hm.\n",
    ),
    "qwen3_coder": (
        "<|im_start|>assistant\n",
        "So:\n<tool_call>\n<function=tie>\n<parameter=knot>\nhitch\n</parameter>\n<parameter=wet>\ntrue\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=count>\n</function>\n</tool_call>",
        "So:",
        "",
    ),
    "llama3_json": (
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        '<|python_tag|>{"name": "tie", "parameters": {"knot": "hitch", "wet": true}}'
        '; {"name": "count", "parameters": {}}',
        "",
        "",
    ),
    "mistral": (
        "[INST]Hello[/INST]",
        '[TOOL_CALLS] [{"name": "tie", "arguments": {"knot": "hitch", "wet": true}}'
        ', {"name": "count", "arguments": {}}]',
        "",
        "",
    ),
    "plain": (
        "User: Hi\n\nAssistant:",
        ' [{"name": "tie", "arguments": {"knot": "hitch", "wet": true}}'
        ', {"name": "count", "arguments": {}}]\nThat is it.',
        "That is it.",
        "",
    ),
    "deepseek_r1": (
        "<\uff5cUser\uff5c>Hi<\uff5cAssistant\uff5c><think>\n",
        "Hm.\n</think>\n\nSo: <tool_call>x</tool_call>",
        "\n\nSo: <tool_call>x</tool_call>",
        "Hm.\n",
    ),
    "chatml_think": (
        "<|im_start|>assistant\n",
        "<think>Hm.\n</think>\n\nSo: <tool_call>x</tool_call>",
        "\n\nSo: <tool_call>x</tool_call>",
        "Hm.\n",
    ),
    "mistral_args": (
        "[INST]Hello[/INST]",
        'So:[TOOL_CALLS]tie[CALL_ID]abc[ARGS]{"knot": "hitch", "wet": true}[TOOL_CALLS]count[ARGS]{}',
        "So:",
        "",
    ),
}
"""By template: the end of a prompt, an answer, its text and its reasoning. Each that can calls both functions."""


def reader_of(tokenizer: Any, prompt: str) -> TemplateReader:
    return TemplateReader(*parsing_of(tokenizer, prompt, TOOLS))


def read(name: str, prompt: str, *pieces: str) -> Said:
    """The answer in ``pieces``, by a built-in template."""
    tokenizer = tiny_tokenizer()
    tokenizer.response_template = BUILT_IN[name]
    reader = reader_of(tokenizer, prompt)
    said = [reader.take(piece, final=False) for piece in pieces] + [reader.take("", final=True)]
    calls = tuple(call for each in said for call in each.calls)
    return Said("".join(each.text for each in said), "".join(each.reasoning for each in said), calls)


HERMES = "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("name", "prompt", "answer", "expected"),
    [
        ("hermes", f"{HERMES}<think>\n\n</think>\n\n", "Hello you", Said("Hello you")),
        ("hermes", f"{HERMES}Three <", "b>turns", Said("b>turns")),
        ("hermes", f"{HERMES}I will \n", " go", Said(" go")),
        ("hermes", f"{HERMES}<tool_call>oops</tool_call>", "yes", Said("yes")),
        (
            "hermes",
            f"{HERMES}<tool_",
            'call>{"name": "f", "arguments": {}}</tool_call>',
            Said(calls=(Call("f", "{}"),)),
        ),
        ("hermes", HERMES, "a \n <tool_call>{x}</tool_call> b", Said("a \n <tool_call>{x}</tool_call> b")),
        ("hermes", HERMES, "<tool_call>[1]</tool_call>", Said("<tool_call>[1]</tool_call>")),
        (
            "hermes",
            HERMES,
            '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
            Said('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
        ),
        (
            "hermes",
            HERMES,
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud83d\\"}"}</tool_call>'
            '<tool_call>{"name": ["f"]}</tool_call>',
            Said('<tool_call>{"name": ["f"]}</tool_call>', calls=(Call("f", '{"a": "\\ud83d"}'),)),
        ),
        ("hermes", HERMES, "<think>hm <b> </think>So", Said("So", "hm <b> ")),
        ("hermes", HERMES, "The tag <think>a</think>.", Said("The tag <think>a</think>.")),
        ("hermes", HERMES, "<tool_call>" + "[" * 100_000, Said("<tool_call>" + "[" * 100_000)),
        ("mistral_args", "[/INST]", '[TOOL_CALLS]f[ARGS]{"a":1} text', Said('[TOOL_CALLS]f[ARGS]{"a":1} text')),
        ("mistral", "[/INST]", "[TOOL_CALLS][1] and", Said("[TOOL_CALLS][1] and")),
        (
            "qwen3_coder",
            HERMES,
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>",
            Said("<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>"),
        ),
    ],
    ids=range(15),
)
def test_no_text_is_lost_or_comes_twice(name: str, prompt: str, answer: str, expected: Said) -> None:
    size = max(1, len(answer) // 5)
    pieces = [answer[start : start + size] for start in range(0, len(answer), size)]
    assert read(name, prompt, answer) == expected
    assert read(name, prompt, *pieces) == expected


def test_blanks_take_no_time_of_the_server() -> None:
    began = time.process_time()
    blanks = " " * 20_000
    assert read("hermes", f"{HERMES}Hi{blanks}x", f"{blanks}y").text == f"{blanks}y"
    assert time.process_time() - began < 20, "a pattern that goes through them anew at each takes minutes"


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("seed", range(4))
def test_built_in_templates_read_any_pieces(name: str, seed: int) -> None:
    prompt, text, content, reasoning = ANSWERS[name]
    tokenizer = tiny_tokenizer()
    tokenizer.response_template = BUILT_IN[name]
    reader = reader_of(tokenizer, f"Call as <tool_call>x</tool_call>{prompt}")
    draw = random.Random(seed)
    cuts = sorted(draw.sample(range(1, len(text)), (0, 3, 20, len(text) - 1)[seed]))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    said = [reader.take(piece, final=False) for piece in pieces] + [reader.take("", final=True)]
    assert "".join(each.text for each in said) == content
    assert "".join(each.reasoning for each in said).lstrip() == reasoning
    calls = [(call.name, json.loads(call.arguments)) for each in said for call in each.calls]
    assert calls == ([HITCH, ("count", {})] if "tool_calls" in BUILT_IN[name]["fields"] else [])


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ('<tool_call>\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\n</tool_call>', "hermes"),
        ("<tool_call>\n<function=example>\n<parameter=p>", "qwen3_coder"),
        ('<|start_header_id|>{"name": function name, "parameters": dictionary}', "llama3_json"),
        ("[AVAILABLE_TOOLS][TOOL_CALLS] [", "mistral"),
        ("[TOOL_CALLS]name[ARGS]", "mistral_args"),
        (PLAIN, "plain"),
        ("<\uff5cAssistant\uff5c><think>\\n{{ content.split('</think>') }}", "deepseek_r1"),
        ("<|im_start|>assistant {{ content.split('</think>') }}", "chatml_think"),
        ("{{ messages }}", None),
    ],
)
def test_templates_are_known_by_those_of_chats(written: str, name: str | None) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = written
    use_response_template(tokenizer, None)
    assert tokenizer.response_template == (None if name is None else BUILT_IN[name])


def test_a_checkpoint_brings_its_own(tmp_path: Any) -> None:
    tokenizer = tiny_tokenizer()
    own = {"start_anchor": ">", "fields": {"content": {}}}
    tokenizer.response_template = own
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    use_response_template(loaded, None)
    assert loaded.response_template == own


def test_a_template_that_fails_gives_the_rest_as_text() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.response_template = BUILT_IN["hermes"]
    reader = reader_of(tokenizer, "<|im_start|>assistant\n")
    said = [reader.take(piece, final=piece == "!") for piece in ("a<tool_call>", "{x", "}</tool_call>", " b", "!")]
    assert said[0] == Said("a")
    assert "".join(each.text for each in said) == "a<tool_call>{x}</tool_call> b!"
    assert Call.of("f", {"é": 1}).arguments == '{"é": 1}'
