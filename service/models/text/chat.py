"""Chat templates: that of the server's settings, and a plain one for models without chat training."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Const, Template

PLAIN = (Path(__file__).parent / "plain.jinja").read_text(encoding="utf-8")
"""Turns as paragraphs, each under the name of its role: what text models have read of conversations. It writes no
special tokens, so the tokenizer adds its own as before any other text. Calls have the form of those that must come."""

BUILT_IN = {"plain": PLAIN}
"""Templates by what the setting ``chat_template`` calls them."""


class TemplateUnusable(ValueError):
    """The template of the settings cannot be used; the message says why."""


def use_template(tokenizer: Any, setting: str) -> None:
    """Give ``tokenizer`` the template that the setting ``chat_template`` names, in place of its default.

    Raises:
        TemplateUnusable: when it is neither a built-in one nor a file that can be read, or no template.
    """
    try:
        template = BUILT_IN.get(setting) or Path(setting).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateUnusable(f"neither {' nor '.join(BUILT_IN)} nor a file that can be read: {error}") from error
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": ""}], chat_template=template, tokenize=False)
    except TemplateSyntaxError as error:
        raise TemplateUnusable(f"{setting}, line {error.lineno}: {error.message}") from error
    except TemplateError:
        pass  # it asks for more than one empty message, which is between it and a conversation
    tokenizer.chat_template = template


def writes_special_tokens(tokenizer: Any) -> bool:
    """True if the tokenizer's template writes special tokens itself: all do but the plain one."""
    return bool(tokenizer.chat_template != PLAIN)


GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
"""Names that transformers gives to every template."""


def template_options(tokenizer: Any) -> list[str]:
    """Variables of the tokenizer's template that a request may set, in alphabetical order."""
    return sorted(_variables(tokenizer.get_chat_template()) - GIVEN - set(tokenizer.special_tokens_map))


def takes_tools(tokenizer: Any) -> bool:
    """True if the tokenizer's template writes the tools of a request."""
    return "tools" in _variables(tokenizer.get_chat_template(tools=[{}]))


def reads_developer(tokenizer: Any, tools: Sequence[dict[str, Any]]) -> bool:
    """True if the tokenizer's template has a rule for the role ``developer``."""
    return "developer" in _texts(tokenizer.get_chat_template(tools=list(tools) or None))


@lru_cache(maxsize=16)
def _variables(template: str) -> set[str]:
    """Names that ``template`` reads and does not set."""
    environment = _environment()
    return find_undeclared_variables(_parsed(template, environment)) - set(environment.globals)


@lru_cache(maxsize=16)
def _texts(template: str) -> frozenset[str]:
    """Constants of ``template`` that are text."""
    constants = (node.value for node in _parsed(template, _environment()).find_all(Const))
    return frozenset(value for value in constants if isinstance(value, str))


def _environment() -> Environment:
    return Environment(extensions=["jinja2.ext.loopcontrols"])


def _parsed(template: str, environment: Environment) -> Template:
    known_tags = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)  # a tag of transformers, for training
    return environment.parse(known_tags)
