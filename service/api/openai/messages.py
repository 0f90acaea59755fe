"""Messages of a conversation, as OpenAI's chat completions take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag, model_validator

from patches import KnownFields, problem
from service.api.openai.body import NOT_USED, Body, CacheControl, text_in
from service.api.openai.tools.schemas import Calls
from service.api.openai.unsupported import NOT_SUPPORTED_IN_MESSAGES
from service.inputs import text_or_list

MOST_MESSAGES = 4096


class TextPart(KnownFields):
    """The one kind of part that models of text read."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = Field(None, description=NOT_USED)

    @classmethod
    def unknown_field(cls, name: str) -> str:
        if name not in {"audio_url", "file", "image_url", "input_audio", "video_url"}:
            return super().unknown_field(name)
        return "unknown field: parts of a message are {type: text, text: ...} here, no images and no sound"


Content = Annotated[Annotated[str, Tag("one")] | Annotated[list[TextPart], Tag("several")], text_or_list("parts")]


class Message(Body):
    """A message, also in the form in which OpenAI's client stores an answer."""

    NOT_SUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = NOT_SUPPORTED_IN_MESSAGES

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = Field(description="Text, or parts of it.")
    name: str | None = None
    cache_control: CacheControl | None = Field(None, description=NOT_USED)
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
        fields: dict[str, Any] = {"role": self.role, "content": text_in(self.content)}
        if self.tool_calls:
            fields["tool_calls"] = [call.for_template() for call in self.tool_calls]
        given = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": self.reasoning_content}
        return fields | {name: value for name, value in given.items() if value}


Messages = Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
