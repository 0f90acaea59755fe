"""Items of responses: messages, calls of functions with their results, and reasoning."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag

from patches import problem
from service.api.openai.answers import ChatToken
from service.api.openai.body import NOT_USED, Body, StoredBody, text_in, type_of
from service.api.openai.messages import MOST_MESSAGES
from service.api.openai.tools.schemas import Arguments, read_arguments
from service.inputs import text_or_list

STORES_NOTHING = (
    "this server stores no items, so none can be referred to. Send the item itself; clients do that with store: false"
)
Status = Literal["in_progress", "completed", "incomplete"]
Id = Annotated[str, Field(max_length=256)]


class InputItem(StoredBody):
    id: Id | None = Field(None, description=NOT_USED)
    status: Status | None = Field(None, description=NOT_USED)


class InputPart(Body):
    NOT_SUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"annotations": ([],), "prompt_cache_breakpoint": ()}

    type: Literal["input_text", "output_text"]
    text: str
    logprobs: list[Any] | None = Field(None, description=NOT_USED)


Content = Annotated[Annotated[str, Tag("one")] | Annotated[list[InputPart], Tag("several")], text_or_list("parts")]


class InputMessage(InputItem):
    """A message, also one of an earlier answer."""

    NOT_SUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"phase": ()}

    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    type: Literal["message"] = "message"

    def for_template(self) -> dict[str, Any]:
        """The message for chat templates."""
        return {"role": self.role, "content": text_in(self.content)}


class FunctionCall(InputItem):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: Id
    name: Annotated[str, Field(max_length=256)]
    arguments: Arguments

    def for_template(self) -> dict[str, Any]:
        """The call for chat templates, in a message without text."""
        arguments = read_arguments(self.arguments)
        call = {"id": self.call_id, "type": "function", "function": {"name": self.name, "arguments": arguments}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}


class FunctionCallOutput(InputItem):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Id
    output: Content

    def for_template(self) -> dict[str, Any]:
        """The result for chat templates."""
        return {"role": "tool", "tool_call_id": self.call_id, "content": text_in(self.output)}


class ReasoningText(Body):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class InputReasoning(InputItem):
    """Reasoning of an earlier answer."""

    NOT_SUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"encrypted_content": (), "summary": ([],)}

    type: Literal["reasoning"]
    content: list[ReasoningText] = Field(default_factory=list)

    def for_template(self) -> dict[str, Any]:
        """The reasoning for chat templates, in a message without text."""
        return {"role": "assistant", "content": "", "reasoning_content": "".join(part.text for part in self.content)}


KINDS = {
    "message": "a_message",
    "function_call": "a_call",
    "function_call_output": "a_result",
    "reasoning": "a_reason",
}
"""Tags of items by their type."""


def _kind(value: Any) -> str:
    return KINDS.get(type_of(value), "a_message")


def _known(value: Any) -> Any:
    """Refuses items of other types; one with nothing but an ``id`` is a reference."""
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    if kind == "item_reference" or (kind is None and value.keys() <= {"id", "type"} and "id" in value):
        raise problem("reference", STORES_NOTHING, "type")
    if kind is not None and str(kind) not in KINDS:
        raise problem("item_type", f"must be one of {', '.join(KINDS)}", "type")
    return value


AnyInputItem = Annotated[
    Annotated[InputMessage, Tag("a_message")]
    | Annotated[FunctionCall, Tag("a_call")]
    | Annotated[FunctionCallOutput, Tag("a_result")]
    | Annotated[InputReasoning, Tag("a_reason")],
    Discriminator(_kind),
    BeforeValidator(_known),
]

Input = Annotated[
    Annotated[str, Tag("one")]
    | Annotated[list[AnyInputItem], Field(min_length=1, max_length=MOST_MESSAGES), Tag("several")],
    text_or_list("items"),
]


def conversation_of(items: Iterable[Any]) -> tuple[list[dict[str, Any]], list[int]]:
    """Messages for chat templates, and the place of the item that each has its text from.

    Reasoning, text and calls of an assistant in a row are one message.
    """
    messages: list[dict[str, Any]] = []
    places: list[int] = []
    for place, message in enumerate(item.for_template() for item in items):
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" == message["role"] else None
        if last is not None and "tool_calls" in message:
            last["tool_calls"] = [*last.get("tool_calls", []), *message["tool_calls"]]
        elif last is not None and not last["content"] and not last.keys() & {"tool_calls"}:
            thoughts = last.get("reasoning_content", "") + message.get("reasoning_content", "")
            added = {**message, "reasoning_content": thoughts}
            last.update({name: value for name, value in added.items() if value})
            places[-1] = place
        else:
            messages.append(message)
            places.append(place)
    return messages, places


def new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ChatToken] = []


class OutputMessage(BaseModel):
    id: str = Field(default_factory=lambda: new_id("msg"))
    type: Literal["message"] = "message"
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputCall(BaseModel):
    id: str = Field(default_factory=lambda: new_id("fc"))
    type: Literal["function_call"] = "function_call"
    status: Status
    call_id: str = Field(default_factory=lambda: new_id("call"))
    name: str
    arguments: str


class OutputReasoning(BaseModel):
    id: str = Field(default_factory=lambda: new_id("rs"))
    type: Literal["reasoning"] = "reasoning"
    status: Status
    summary: list[Any] = []
    content: list[ReasoningText]


OutputItem = OutputMessage | OutputCall | OutputReasoning
