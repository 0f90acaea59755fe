"""Messages of a conversation, as OpenAI's chat completions take them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from patches import KnownFields, problem, unknown
from service.api.openai.body import Body
from service.api.openai.tools.schemas import Calls
from service.api.openai.unsupported import NOT_SUPPORTED_IN_MESSAGES
from service.errors import ApiError, bad_request
from service.inputs import one_or_several
from service.models.registry import ServedModel
from service.models.text.chat import takes_tools, template_options, writes_special_tokens

MOST_MESSAGES = 4096

MOST_OF_VARIABLES = 1 << 14
"""Characters of a template's variables, as JSON. A template may write them behind each message."""


class TextPart(KnownFields):
    """The one kind of part that models of text read."""

    type: Literal["text"]
    text: str

    @classmethod
    def unknown_field(cls, name: str) -> str:
        if name not in {"audio_url", "file", "image_url", "input_audio", "video_url"}:
            return super().unknown_field(name)
        return "unknown field: parts of a message are {type: text, text: ...} here, no images and no sound"


Content = Annotated[
    Annotated[str, Tag("one")] | Annotated[list[TextPart], Tag("several")], Discriminator(one_or_several)
]


class Message(Body):
    """A message, also in the form in which OpenAI's client stores an answer."""

    NOT_SUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = NOT_SUPPORTED_IN_MESSAGES

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = Field(description="Text, or parts of it.")
    name: str | None = None
    reasoning_content: str | None = Field(None, description="Reasoning of an assistant, which some templates write.")
    tool_calls: Calls | None = Field(None, description="Calls of an assistant.")
    tool_call_id: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="The call that a tool answers."
    )

    @model_validator(mode="before")
    @classmethod
    def _assistants_may_be_silent(cls, fields: Any) -> Any:
        is_silent = isinstance(fields, dict) and fields.get("role") == "assistant" and fields.get("content") is None
        return {**fields, "content": ""} if is_silent else fields

    @model_validator(mode="after")
    def _check_calls(self) -> Message:
        for name, role in (("tool_calls", "assistant"), ("reasoning_content", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, name) and self.role != role:
                raise problem("wrong_role", f"only in messages of the role {role}", name)
        return self

    def for_template(self) -> dict[str, Any]:
        """The message for chat templates."""
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        fields: dict[str, Any] = {"role": self.role, "content": "".join(parts)}
        if self.tool_calls:
            fields["tool_calls"] = [call.for_template() for call in self.tool_calls]
        given = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": self.reasoning_content}
        return fields | {name: value for name, value in given.items() if value}


Messages = Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]


class Templating(Body):
    """Options of the chat template, as in vLLM."""

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
    ) -> str:
        """The conversation of the field ``param`` as one text, by the chat template of ``served``.

        Raises:
            ApiError: for a model without a template, or variables, messages or ``tools`` that the template does not
                take. Also for an answer that both begins and continues.
        """
        if self.continue_final_message and self.add_generation_prompt:
            raise bad_request("add_generation_prompt: not with continue_final_message", "add_generation_prompt")
        tokenizer = served.tokenizer
        if not tokenizer.chat_template:
            message = (
                f"{served.name!r} has no chat template: set ROPEWAY_CHAT_TEMPLATE to plain or a file at start-up, "
                "or use /v1/completions"
            )
            raise bad_request(message, "model", "no_chat_template")
        begins = not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt
        try:
            if tools and not takes_tools(tokenizer):
                raise bad_request(f"tools: the chat template of {served.name!r} does not write them", "tools")
            if self.chat_template_kwargs:
                self._check_variables(template_options(tokenizer))
            return str(
                tokenizer.apply_chat_template(
                    messages,
                    tools=list(tools) or None,
                    tokenize=False,
                    add_generation_prompt=begins,
                    continue_final_message=self.continue_final_message,
                    **self.chat_template_kwargs,
                )
            )
        except ApiError:
            raise
        except Exception as error:  # a template is a program, and its inputs are the client's
            given = f"{param} or chat_template_kwargs" if self.chat_template_kwargs else param
            message = f"{given}: the model's chat template refuses them: {error or type(error).__name__}"
            raise bad_request(message, param) from error

    def special_tokens(self, served: ServedModel) -> bool:
        """True if the tokenizer adds special tokens to the conversation."""
        if self.add_special_tokens is None:
            return not writes_special_tokens(served.tokenizer)
        return self.add_special_tokens

    def _check_variables(self, known: list[str]) -> None:
        if len(json.dumps(self.chat_template_kwargs)) > MOST_OF_VARIABLES:
            message = f"chat_template_kwargs: may have at most {MOST_OF_VARIABLES} characters of JSON"
            raise bad_request(message, "chat_template_kwargs")
        for name in self.chat_template_kwargs:
            if name not in known:
                nothing = f"{name!r}: the template reads no variables"
                why = unknown("variable of the chat template", name, known) if known else nothing
                raise bad_request(f"chat_template_kwargs: {why}", "chat_template_kwargs")
