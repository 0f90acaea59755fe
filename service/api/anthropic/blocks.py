"""Messages of a conversation, as Anthropic's API takes them: each is a text, or a list of blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from patches import problem
from service.api.openai.body import NOT_USED, CacheControl, StoredBody, text_in, type_of
from service.api.openai.messages import MOST_MESSAGES
from service.inputs import as_json, text_or_list

NOT_TEXT = ("document", "image", "search_result")
Id = Annotated[str, Field(max_length=256)]


class Block(StoredBody):
    NOT_SUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"caller": ({"type": "direct"},), "citations": ([],)}

    cache_control: CacheControl | None = Field(None, description=NOT_USED)


class TextBlock(Block):
    type: Literal["text"]
    text: str


class ThinkingBlock(Block):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(None, description=NOT_USED)


def _writable(value: dict[str, Any]) -> dict[str, Any]:
    as_json(value)  # templates write it
    return value


class ToolUseBlock(Block):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: Id
    name: Annotated[str, Field(max_length=256)]
    input: Annotated[dict[str, Any], AfterValidator(_writable)]

    def for_template(self) -> dict[str, Any]:
        """The call for chat templates."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.input}}


def _one_of(kinds: Sequence[str], value: Any) -> Any:
    if isinstance(value, Block):
        return value
    if not isinstance(value, dict):
        raise problem("block", "must be an object: a block with its type")
    if value.get("type") in NOT_TEXT:
        raise problem("block_type", "models of text read no images and no documents", "type")
    if value.get("type") not in kinds:
        raise problem("block_type", f"must be one of {', '.join(kinds)}", "type")
    return value


Texts = Annotated[
    Annotated[str, Tag("one")]
    | Annotated[list[Annotated[TextBlock, BeforeValidator(partial(_one_of, ("text",)))]], Tag("several")],
    text_or_list("blocks"),
]
"""A text, or blocks of it."""


class ToolResultBlock(Block):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Id
    content: Texts = ""
    is_error: bool = Field(False, description="Accepted and not used: the text of an error says so.")


KINDS = {"text": "a_text", "tool_use": "a_call", "tool_result": "a_result", "thinking": "a_reason"}
"""Tags of blocks by their type."""

OF_ROLES = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking"),
    "system": ("text",),
}
"""Types of the blocks in messages of each role."""


def _kind(value: Any) -> str | None:
    return KINDS.get(type_of(value))


AnyBlock = Annotated[
    Annotated[TextBlock, Tag("a_text")]
    | Annotated[ToolUseBlock, Tag("a_call")]
    | Annotated[ToolResultBlock, Tag("a_result")]
    | Annotated[ThinkingBlock, Tag("a_reason")],
    Discriminator(_kind),
    BeforeValidator(partial(_one_of, tuple(KINDS))),
]


class Turn(StoredBody):
    """A message, also one of an earlier answer."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag("one")] | Annotated[list[AnyBlock], Field(max_length=MOST_MESSAGES), Tag("several")],
        text_or_list("blocks"),
    ]

    @model_validator(mode="after")
    def _check_blocks(self) -> Turn:
        kinds = OF_ROLES[self.role]
        for place, block in enumerate(self.content if isinstance(self.content, list) else []):
            if block.type not in kinds:
                message = f"a message of the role {self.role} has blocks of {' and '.join(kinds)}"
                raise problem("wrong_role", message, f"content.{place}.type")
        return self

    def for_template(self) -> list[dict[str, Any]]:
        """Messages for chat templates: one for each result of a tool, and for all that is between them."""
        if isinstance(self.content, str) or not self.content:
            return [{"role": self.role, "content": self.content or ""}]
        return [_joined(run) for run in _runs(map(self._of_block, self.content))]

    def _of_block(self, block: Block) -> dict[str, Any]:
        match block:
            case ToolResultBlock():
                return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text_in(block.content)}
            case ToolUseBlock():
                return {"role": self.role, "content": "", "tool_calls": [block.for_template()]}
            case ThinkingBlock():
                return {"role": self.role, "content": "", "reasoning_content": block.thinking}
            case TextBlock():
                return {"role": self.role, "content": block.text}
        raise TypeError(block)


Turns = Annotated[list[Turn], Field(min_length=1, max_length=MOST_MESSAGES)]


def conversation_of(turns: Sequence[Turn]) -> tuple[list[dict[str, Any]], list[int]]:
    """Messages for chat templates, and the place of the turn that each began in.

    Turns of one role in a row are one message, as in Anthropic's API: many templates demand that roles alternate. Those
    of users are lines, and a text of the assistant goes on in the next turn. A last turn in which it says nothing is
    left out.
    """
    placed = [(message, place) for place, turn in enumerate(turns) for message in turn.for_template()]
    runs = _runs(message for message, _ in placed)
    messages = [_joined(run, "" if run[0]["role"] == "assistant" else "\n") for run in runs]
    begins = accumulate((len(run) for run in runs), initial=0)
    places = [placed[at][1] for at, _ in zip(begins, runs, strict=False)]
    if messages[-1] == {"role": "assistant", "content": ""}:
        return messages[:-1], places[:-1]
    return messages, places


def _runs(messages: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Messages of one role in a row. A result of a tool is alone."""
    runs: list[list[dict[str, Any]]] = []
    for message in messages:
        if runs and runs[-1][0]["role"] == message["role"] != "tool":
            runs[-1].append(message)
        else:
            runs.append([message])
    return runs


def _joined(run: Sequence[dict[str, Any]], between: str = "") -> dict[str, Any]:
    """One message of a run."""
    whole = dict(run[0])
    for name in ("content", "reasoning_content"):
        if text := between.join(filter(None, (message.get(name) for message in run))):
            whole[name] = text
    if calls := [call for message in run for call in message.get("tool_calls", ())]:
        whole["tool_calls"] = calls
    return whole
