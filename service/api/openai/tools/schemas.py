"""Functions and calls, as OpenAI's chat completions have them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Discriminator, Field, Tag

from patches import read_json
from service.api.generation.structure import STRICT, Schema
from service.api.openai.body import NOT_USED, Body, CacheControl, type_of
from service.inputs import as_json, matching

MOST_TOOLS = 128

BY_GRAMMAR = "Calls that must come have arguments by a grammar. Beside a form, so have other calls of strict functions."

MOST_ARGUMENTS = 1 << 20
"""Characters of the arguments of one call."""

NAME = r"^[a-zA-Z0-9_.-]{1,128}$"
Name = Annotated[
    str,
    matching(NAME, "must have 1 to 128 characters: English letters, digits, '_', '.' and '-'"),
    Field(description="Letters, digits, `_`, `.` and `-`.", json_schema_extra={"pattern": NAME}),
]


class _Hinted(Body):
    cache_control: CacheControl | None = Field(None, description=NOT_USED)


class Function(_Hinted):
    """A function of the client: its name, its purpose, and the JSON schema of its arguments."""

    name: Name
    description: str | None = None
    parameters: Schema | None = Field(None, description="JSON schema of the arguments; without one, any object.")
    strict: bool | None = Field(None, description=f"{BY_GRAMMAR} {STRICT}")

    def for_template(self) -> dict[str, Any]:
        """The function for chat templates."""
        return {
            "name": self.name,
            "description": self.description or "",
            "parameters": self.parameters or {"type": "object", "properties": {}},
        }


class Tool(_Hinted):
    """The form of chats."""

    type: Literal["function"]
    function: Function


class _Typed(Body):
    type: Literal["function"]


class FlatTool(Function, _Typed):
    """The form of responses."""


Tools = Annotated[list[Tool], Field(max_length=MOST_TOOLS)]
FlatTools = Annotated[list[FlatTool], Field(max_length=MOST_TOOLS)]


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    """The function that must be called, in the form of chats."""

    type: Literal["function"]
    function: NamedFunction


class FlatNamedTool(NamedFunction):
    """The same in the form of responses."""

    type: Literal["function"]


class Allowed(Body):
    """The functions that may be called, or must be if they are ``required``."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MOST_TOOLS)]

    @property
    def names(self) -> list[str]:
        return [tool.function.name for tool in self.tools]


class AllowedTools(Body):
    """The same in a choice of chats. The template writes the other functions too."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


class FlatAllowedTools(Body):
    """The same in the form of responses."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatNamedTool], Field(min_length=1, max_length=MOST_TOOLS)]

    @property
    def names(self) -> list[str]:
        return [tool.name for tool in self.tools]


def _kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "one"
    if not isinstance(value, dict | BaseModel):
        return None
    return "allowed" if type_of(value) == "allowed_tools" else "several"


_BY_KIND = Discriminator(
    _kind,
    custom_error_type="tool_choice_type",
    custom_error_message="Input should be 'none', 'auto', 'required' or an object",
)

_Word = Annotated[Literal["none", "auto", "required"], Tag("one")]

ToolChoice = Annotated[_Word | Annotated[NamedTool, Tag("several")] | Annotated[AllowedTools, Tag("allowed")], _BY_KIND]
FlatToolChoice = Annotated[
    _Word | Annotated[FlatNamedTool, Tag("several")] | Annotated[FlatAllowedTools, Tag("allowed")], _BY_KIND
]


def read_arguments(text: str) -> Any:
    """The arguments of a call; nothing is an empty object.

    Raises:
        PydanticCustomError: for a text that is no JSON, as ``read_json``.
    """
    found = read_json(text or "{}")
    as_json(found)  # templates write it
    return found


def _readable(text: str) -> str:
    read_arguments(text)
    return text


Arguments = Annotated[str, Field(max_length=MOST_ARGUMENTS), AfterValidator(_readable)]


class CalledFunction(Body):
    name: Annotated[str, Field(max_length=256)]
    arguments: Arguments = Field(description="The arguments, an object as JSON.")


class Call(Body):
    """A call of an earlier answer, or of this one."""

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(None, description=NOT_USED)

    def for_template(self) -> dict[str, Any]:
        """The call for chat templates, which write the arguments as JSON themselves."""
        arguments = read_arguments(self.function.arguments)
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


Calls = Annotated[list[Call], Field(max_length=MOST_TOOLS)]
