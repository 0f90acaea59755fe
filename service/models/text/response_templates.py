"""Response templates: how a model writes calls of tools and its reasoning. transformers' ``ResponseParser`` reads them.

Checkpoints may bring their own (``response_template`` of the tokenizer). Others are known by their chat templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from service.models.text.chat import TemplateUnusable
from service.models.text.grammar_parts import LIST, Listing

_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}}
_THOUGHT = {"reasoning_content": {"open_pattern": r"\A\s{0,8}<think>", "close": "</think>", "content": "text"}}

REASONING = frozenset({"reasoning_content", "thinking"})
"""Fields of response templates for a model's reasoning."""


def _template(anchors: list[str], calls: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    fields = more if calls is None else {**more, "tool_calls": calls}
    text = {"content": "text", "content_args": {"strip": False}}
    return {"start_anchor": anchors, "fields": {**fields, "content": text}}


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
    # <think>...</think> only, and calls are not read: DeepSeek R1 and its distilled models, and others
    "deepseek_r1": _template(["<\uff5cAssistant\uff5c>"], None, **_THOUGHT),
    "chatml_think": _template(["<|im_start|>assistant\n"], None, **_THOUGHT),
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

LISTINGS = {
    "hermes": Listing(opens="<tool_call>", closes="</tool_call>", between=""),
    "llama3_json": Listing(between="; ", arguments="parameters"),
    "mistral": Listing(before="[TOOL_CALLS]", is_list=True),
    "mistral_args": Listing(opens="[TOOL_CALLS]", behind_name="[ARGS]", between=""),
    "plain": LIST,
}
"""The form of calls by built-in template, where a grammar can make them: their arguments are JSON."""

MARKS = (
    ("plain", ("Functions, called by [{",)),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>", "arguments")),
    ("mistral_args", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama3_json", ("<|start_header_id|>", "parameters")),
    ("deepseek_r1", ("<\uff5cAssistant\uff5c>", "</think>")),
    ("chatml_think", ("<|im_start|>", "</think>")),
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


def reads_calls(tokenizer: Any) -> bool:
    """True if the form of the model's calls is known."""
    template = tokenizer.response_template
    return template is not None and "tool_calls" in template["fields"]


def thinks(tokenizer: Any) -> bool:
    """True if the model writes reasoning in a known form: its chat template does, too."""
    return _thought(tokenizer) is not None


class Parsing(NamedTuple):
    """A parser of one answer; ``held`` characters of the prompt's end may come out of it with the answer.

    ``closes`` is the pattern of a call's end; None for calls in JSON, which is whole or no JSON.
    """

    parser: Any
    held: int
    closes: str | None


def parsing_of(tokenizer: Any, prompt: str, tools: Sequence[dict[str, Any]]) -> Parsing:
    """A parser of one answer to ``prompt``, whose end may begin the answer: with ``<think>``, for instance. Without
    ``tools`` nothing is a call."""
    template = tokenizer.response_template
    calls = template["fields"].get("tool_calls", {})
    if not tools:
        fields = {name: field for name, field in template["fields"].items() if name != "tool_calls"}
        template = {**template, "fields": fields}
    patterns = map(re.escape, _literals(template, "start_anchor"))
    begins = re.search("|".join(patterns) or template["start_anchor_pattern"], prompt, re.DOTALL)
    try:
        prefix = prompt if begins else _begun(template, prompt)
        parser = tokenizer.get_response_parser(template, prefix=prefix, tools=list(tools))
    except (KeyError, RecursionError, TypeError, ValueError):  # a begun answer with a call that cannot be read
        parser = tokenizer.get_response_parser(template, prefix="", tools=list(tools))
    closes = None if calls.get("content") == "json" else _pattern(calls, "close")
    return Parsing(parser, len(parser._buffer) - parser._pos, closes)


def _begun(template: dict[str, Any], prompt: str) -> str:
    """The end of a prompt that begins or ends reasoning: models of one form may have other beginnings of answers."""
    for field in (field for name, field in template["fields"].items() if name in REASONING):
        opens, closes = _delimiter(field, "open"), _delimiter(field, "close")
        if opens and (found := re.search(re.escape(opens) + r"\s*\Z", prompt)):
            return found[0]
        if opens and closes and re.search(re.escape(closes) + r"\s*\Z", prompt):
            return opens + closes
    return ""


class Thought(NamedTuple):
    """Delimiters of reasoning, which the prompt may have ``begun``."""

    opens: str
    closes: str
    begun: bool


def thought_of(tokenizer: Any, prompt: str) -> Thought | None:
    """The reasoning that an answer to ``prompt`` may begin with; None if it cannot.

    Raises:
        ValueError: when the prompt has begun one without a known end.
    """
    field = _thought(tokenizer)
    if field is None:
        return None
    opens, closes = _delimiter(field, "open"), _delimiter(field, "close")

    def is_reasoning(text: str) -> bool:
        parser = parsing_of(tokenizer, prompt, []).parser
        has_ended = any(
            (event["type"] == "region_close" and event["field"] in REASONING)
            or (event["field"] == "content" and event.get("text", "").strip())
            for event in parser.initial_events
        )
        parser.feed(text)
        return not has_ended and parser._current in REASONING

    if is_reasoning("."):  # a delimiter at the end of the prompt counts with the text behind it only
        if closes is None:
            raise ValueError("it ends its reasoning in several ways")
        return Thought(opens or "", closes, begun=True)
    if opens is None or closes is None:
        return None
    return Thought(opens, closes, begun=False) if is_reasoning(f"{opens}.") else None


def listing_of(tokenizer: Any) -> Listing | None:
    """The form of the model's calls, if a grammar can make them."""
    template = tokenizer.response_template
    calls = None if template is None else template["fields"].get("tool_calls")
    forms = ((BUILT_IN[name]["fields"]["tool_calls"], listing) for name, listing in LISTINGS.items())
    return next((listing for form, listing in forms if calls == form), None)


def shows_special_tokens(tokenizer: Any) -> bool:
    """True if a delimiter of reasoning is a special token, which texts leave out."""
    field = _thought(tokenizer) or {}
    patterns = [_pattern(field, edge) for edge in ("open", "close")]
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return any(_escaped(text) in pattern for pattern in patterns for text in special)


def _thought(tokenizer: Any) -> dict[str, Any] | None:
    """The field of reasoning. None if the chat template has no such end. None, too, if texts have a beginning:
    that of a form would be missing."""
    fields = {} if tokenizer.response_template is None else tokenizer.response_template["fields"]
    if _pattern(fields.get("content", {}), "open"):
        return None
    for field in (fields[name] for name in sorted(REASONING) if name in fields):
        opens, closes = _pattern(field, "open"), _pattern(field, "close")
        if opens and closes and re.search(closes, str(tokenizer.chat_template or "")):
            return dict(field)
    return None


def _literals(field: dict[str, Any], key: str) -> list[str]:
    literal = field.get(key, [])
    return [literal] if isinstance(literal, str) else literal


def _pattern(field: dict[str, Any], edge: str) -> str:
    """The regular expression of a field's ``open`` or ``close``; empty without one."""
    return str(field.get(f"{edge}_pattern") or "|".join(map(_escaped, _literals(field, edge))))


def _escaped(literal: str) -> str:
    return re.escape(literal).replace("\n", "n")


def _delimiter(field: dict[str, Any], edge: str) -> str | None:
    """The one text that a field opens or closes with, behind blanks; None if there are more."""
    literals = _literals(field, edge)
    return literals[0] if len(literals) == 1 else _literal(_pattern(field, edge))


def _literal(pattern: str) -> str | None:
    """The one text that matches a regular expression, behind blanks; None if there are more."""
    found = re.fullmatch(r"(?:\\A)?(?:\\s\{0,8\})?((?:[^\\^$.|?*+(){}\[\]]|\\\W)+)", pattern)
    return None if found is None else re.sub(r"\\(\W)", r"\1", found[1])


def _read(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"neither {' nor '.join(BUILT_IN)} nor a file with JSON that can be read: {error}"
        raise TemplateUnusable(message) from error
