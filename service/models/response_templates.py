"""Response templates: how a model writes calls of tools and its reasoning. transformers' ``ResponseParser`` reads them.

Checkpoints may bring their own (``response_template`` of the tokenizer). Others are known by their chat templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from service.models.chat import TemplateUnusable

_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}}
_THOUGHT = {"reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"}}


def _template(anchors: list[str], calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    fields = {**more, "tool_calls": calls, "content": {"content": "text", "content_args": {"strip": False}}}
    return {"start_anchor": anchors, "fields": fields}


BUILT_IN: dict[str, dict[str, Any]] = {
    # <tool_call>{"name": ..., "arguments": {...}}</tool_call>: Hermes, Qwen 2.5 and 3, and many others
    "hermes": _template(
        ["<|im_start|>assistant\n"],
        {
            "open_pattern": r"\s{0,8}<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.arguments}"},
            },
        },
        **_THOUGHT,
    ),
    # <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>: Qwen3-Coder, Qwen 3.5
    "qwen3_coder": _template(
        ["<|im_start|>assistant\n"],
        {
            "open_pattern": r"\s{0,8}<tool_call>\s{0,8}<function=(?P<name>[^>\n]{1,64})>",
            "close_pattern": r"</function>\s{0,8}</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        **_THOUGHT,
    ),
    # {"name": ..., "parameters": {...}} is the whole answer, several behind semicolons: Llama 3.1 to 3.3
    "llama3_json": _template(
        ["<|start_header_id|>assistant<|end_header_id|>\n\n"],
        {
            "open_pattern": r"(?:\A\s{0,8}(?:<\|python_tag\|>)?|;\s{0,8})(?=\{\s{0,8}\"name\")",
            "close_pattern": r"(?=;\s{0,8}\{\s{0,8}\"name\")",
            "repeats": True,
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
            },
        },
    ),
    # [{"name": ..., "arguments": {...}}] is the whole answer: our own chat template for models without one
    "plain": _template(
        ["Assistant:"],
        {
            "open_pattern": r"\A\s{0,8}(?=\[\s{0,8}\{\s{0,8}\"name\")",
            "close_pattern": r"(?<=\}\])\n",
            "content": "json",
            "transform": _CALL,
            "transform_each": True,
        },
    ),
    # [TOOL_CALLS][{"name": ..., "arguments": {...}}]: Mistral up to its third tokenizer
    "mistral": _template(
        ["[/INST]", "[/TOOL_RESULTS]"],
        {"open": "[TOOL_CALLS]", "content": "json", "transform": _CALL, "transform_each": True},
    ),
    # [TOOL_CALLS]NAME[ARGS]{...}: Mistral from its eleventh tokenizer on
    "mistral_args": _template(
        ["[/INST]", "[/TOOL_RESULTS]"],
        {
            "open_pattern": r"\[TOOL_CALLS\](?P<name>[^\[{]{1,64}?)(?:\[CALL_ID\][^\[]{0,64})?(?:\[ARGS\])?(?=\{)",
            "close_pattern": r"(?=\[TOOL_CALLS\])",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    ),
}
"""By what the setting ``response_template`` calls them."""

MARKS = (
    ("plain", ("Functions, called by [{",)),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>", "arguments")),
    ("mistral_args", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama3_json", ("<|start_header_id|>", "parameters")),
)
"""Built-in templates, each with parts of the chat templates that go with it."""


def use_response_template(tokenizer: Any, setting: str | None) -> None:
    """Give ``tokenizer`` the response template of the setting, or else one that goes with its chat template.

    Raises:
        TemplateUnusable: when the setting names no built-in one, and no file with one.
    """
    if setting is not None:
        tokenizer.response_template = BUILT_IN.get(setting) or _read(setting)
        try:
            tokenizer.get_response_parser(prefix="")
        except ValueError as error:
            raise TemplateUnusable(f"{setting}: {error}") from error
    elif getattr(tokenizer, "response_template", None) is None:
        chat = str(tokenizer.chat_template or "")
        found = next((name for name, marks in MARKS if all(mark in chat for mark in marks)), None)
        tokenizer.response_template = None if found is None else BUILT_IN[found]


class Parsing(NamedTuple):
    """A parser of one answer; ``held`` characters of the prompt's end may come out of it with the answer.

    ``closes`` is the pattern of a call's end; None for calls in JSON, which is whole or no JSON.
    """

    parser: Any
    held: int
    closes: str | None


def parsing_of(tokenizer: Any, prompt: str, tools: Sequence[dict[str, Any]]) -> Parsing:
    """A parser of one answer to ``prompt``, whose end may begin the answer: with ``<think>``, for instance."""
    template = tokenizer.response_template
    anchors = template.get("start_anchor", [])
    patterns = [re.escape(each) for each in ([anchors] if isinstance(anchors, str) else anchors)]
    begins = re.search("|".join(patterns) or template["start_anchor_pattern"], prompt, re.DOTALL)
    try:
        parser = tokenizer.get_response_parser(prefix=prompt if begins else "", tools=list(tools))
    except (KeyError, RecursionError, TypeError, ValueError):  # a begun answer with a call that cannot be read
        parser = tokenizer.get_response_parser(prefix="", tools=list(tools))
    calls = template["fields"].get("tool_calls", {})
    closes = None if calls.get("content") == "json" else calls.get("close_pattern") or re.escape(calls.get("close", ""))
    return Parsing(parser, len(parser._buffer) - parser._pos, closes)


def _read(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"neither {' nor '.join(BUILT_IN)} nor a file with JSON that can be read: {error}"
        raise TemplateUnusable(message) from error
