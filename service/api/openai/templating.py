"""Conversations as texts, by the chat template of the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from patches import unknown
from service.api.openai.body import Body
from service.errors import ApiError, bad_request
from service.models.registry import ServedModel
from service.models.text.chat import reads_developer, takes_tools, template_options, writes_special_tokens
from service.models.text.dropped import Render, rendered
from service.models.text.response_templates import thinks

MOST_OF_VARIABLES = 1 << 14
"""Characters of a template's variables, as JSON. A template may write them behind each message."""

EFFORT = "reasoning_effort"
"""OpenAI's field, and the variable of templates that read it, such as that of gpt-oss."""

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

SHOWN = 32
"""Characters of a message that an error repeats."""


class Templating(Body):
    """Options of the chat template, as in vLLM. ``DEFAULT_EFFORT`` of reasoning asks for nothing."""

    DEFAULT_EFFORT: ClassVar[str | None] = None

    add_generation_prompt: bool | None = Field(
        None, description="The start of an answer comes last; it does by default, unless a message is continued."
    )
    continue_final_message: bool = Field(False, description="The last message is open: the answer continues its text.")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Variables of the model's template, such as `enable_thinking`."
    )
    add_special_tokens: bool | None = Field(
        None, description="Add the tokenizer's special tokens; by default only where the template writes none."
    )

    def templated(
        self,
        messages: list[dict[str, Any]],
        served: ServedModel,
        param: str = "messages",
        tools: Sequence[dict[str, Any]] = (),
        fields: Sequence[str] = (),
    ) -> str:
        """The conversation of the field ``param`` as one text, by the chat template of ``served``.

        A developer is the successor of ``system``: it has this role for a template that does not read its own.
        ``fields`` are those of the messages: by default the items of ``param``.

        Raises:
            ApiError: for a model without a template, or variables, messages or ``tools`` that the template does not
                take. Also for an answer that both begins and continues.
        """
        tokenizer = served.tokenizer
        self._check_template(served, tools)
        try:
            is_open = self.is_open(messages)
            render = self._rendering(tokenizer, tools, self.variables(tokenizer), begins=not is_open)
            takes_developer = reads_developer(tokenizer, tools)
            own = messages if takes_developer else [_as_system(message) for message in messages]
            text, dropped = rendered(own, render, is_open=is_open)
        except ApiError:
            raise
        except Exception as error:  # a template is a program, and its inputs are the client's
            raise self._refused_by_template(param, error) from error
        if dropped is not None:
            raise _left_out(messages[dropped], fields[dropped] if fields else f"{param}.{dropped}")
        return text

    def is_open(self, messages: Sequence[dict[str, Any]]) -> bool:
        """True if the answer continues the text of the last one of ``messages``."""
        return self.continue_final_message

    @property
    def effort(self) -> tuple[str, str | None]:
        """The field of the effort of reasoning, and its value."""
        return EFFORT, None

    def special_tokens(self, served: ServedModel) -> bool:
        """True if the tokenizer adds special tokens to the conversation."""
        if self.add_special_tokens is None:
            return not writes_special_tokens(served.tokenizer)
        return self.add_special_tokens

    def _check_template(self, served: ServedModel, tools: Sequence[dict[str, Any]]) -> None:
        if self.continue_final_message and self.add_generation_prompt:
            raise bad_request("add_generation_prompt: not with continue_final_message", "add_generation_prompt")
        if not served.tokenizer.chat_template:
            message = (
                f"{served.name!r} has no chat template: set ROPEWAY_CHAT_TEMPLATE to plain or a file at start-up, "
                "or use /v1/completions"
            )
            raise bad_request(message, "model", "no_chat_template")
        if tools and not takes_tools(served.tokenizer):
            raise bad_request(f"tools: the chat template of {served.name!r} does not write them", "tools")

    def _refused_by_template(self, param: str, error: Exception) -> ApiError:
        given = f"{param} or chat_template_kwargs" if self.chat_template_kwargs else param
        message = f"{given}: the model's chat template refuses them: {error or type(error).__name__}"
        return bad_request(message, param)

    def _rendering(
        self, tokenizer: Any, tools: Sequence[dict[str, Any]], variables: dict[str, Any], *, begins: bool
    ) -> Render:
        """From messages to their text, in which the last one may be open. An answer ``begins`` by default."""
        begins = begins if self.add_generation_prompt is None else self.add_generation_prompt

        def render(messages: list[dict[str, Any]], *, is_open: bool = False) -> str:
            return str(
                tokenizer.apply_chat_template(
                    messages,
                    tools=list(tools) or None,
                    tokenize=False,
                    add_generation_prompt=begins,
                    continue_final_message=is_open,
                    **variables,
                )
            )

        return render

    def variables(self, tokenizer: Any) -> dict[str, Any]:
        """Variables for the template.

        Raises:
            ApiError: for those that it does not read, or two values of one.
        """
        field, effort = self.effort
        known = template_options(tokenizer) if self.chat_template_kwargs or effort else []
        if self.chat_template_kwargs:
            self._check_variables(known)
        has_no_need = effort == self.DEFAULT_EFFORT or (effort == "none" and not thinks(tokenizer))
        if effort is None or (has_no_need and EFFORT not in known):
            return self.chat_template_kwargs
        if EFFORT not in known:
            reads = f"chat_template_kwargs has those that it does: {', '.join(known)}" if known else "It reads none"
            message = f"{field}: the model's chat template does not read the variable {EFFORT}; leave it out. {reads}"
            raise bad_request(message, field)
        if self.chat_template_kwargs.get(EFFORT, effort) != effort:
            raise bad_request(f"{field}: differs from chat_template_kwargs.{EFFORT}, which it means", field)
        return {**self.chat_template_kwargs, EFFORT: effort}

    def _check_variables(self, known: list[str]) -> None:
        if len(json.dumps(self.chat_template_kwargs)) > MOST_OF_VARIABLES:
            message = f"chat_template_kwargs: may have at most {MOST_OF_VARIABLES} characters of JSON"
            raise bad_request(message, "chat_template_kwargs")
        for name in self.chat_template_kwargs:
            if name not in known:
                nothing = f"{name!r}: the template reads no variables"
                why = unknown("variable of the chat template", name, known) if known else nothing
                raise bad_request(f"chat_template_kwargs: {why}", "chat_template_kwargs")


def _as_system(message: dict[str, Any]) -> dict[str, Any]:
    """The message, by ``system`` if a developer wrote it."""
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _left_out(message: dict[str, Any], field: str) -> ApiError:
    """The refusal of a message that the client sent in ``field``."""
    begins, role = message["content"][:SHOWN], message["role"]
    says = f"{field}: the model's chat template leaves out this message of the role {role!r}, {begins!r}. "
    return bad_request(f"{says}Put its text into a message of another role", field)
