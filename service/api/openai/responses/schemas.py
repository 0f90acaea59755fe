"""Bodies of ``/v1/responses``: messages of text in, one message of text out. No answer is stored, no tool is called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Discriminator, Field, Tag
from typing_extensions import override

from service.api.generation.structure import Structure
from service.api.openai.body import Body
from service.api.openai.formats import TextOptions
from service.api.openai.messages import MOST_MESSAGES
from service.api.openai.schemas import NOT_USED, SHORT, ConversationBody, example
from service.api.openai.unsupported import NOT_SUPPORTED
from service.api.responses import AutoChoice
from service.inputs import one_or_several


class InputPart(Body):
    NOT_SUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **{"annotations": ([],), "logprobs": ([],), "prompt_cache_breakpoint": ()}
    }

    type: Literal["input_text", "output_text"]
    text: str


class InputMessage(Body):
    """A message, also one of an earlier answer."""

    NOT_SUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"phase": ()}

    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[
        Annotated[str, Tag("one")] | Annotated[list[InputPart], Tag("several")], Discriminator(one_or_several)
    ]
    type: Literal["message"] = "message"
    id: str | None = Field(None, description=NOT_USED)
    status: Literal["in_progress", "completed", "incomplete"] | None = Field(None, description=NOT_USED)

    def for_template(self) -> dict[str, str]:
        """The message for chat templates."""
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        return {"role": self.role, "content": "".join(parts)}


Input = Annotated[
    Annotated[str, Tag("one")]
    | Annotated[list[InputMessage], Field(min_length=1, max_length=MOST_MESSAGES), Tag("several")],
    Discriminator(one_or_several),
]


class ResponsesRequest(ConversationBody):
    """OpenAI's responses, by the chat template of the model."""

    NOT_SUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **NOT_SUPPORTED,
        **dict.fromkeys(("access_programs", "background_options", "context_management", "conversation", "image"), ()),
        **dict.fromkeys(("max_tokens", "max_tool_calls", "previous_response_id", "prompt"), ()),
        "background": (False,),
        "include": ([],),
        "reasoning": ({},),
        "stream_options": ({}, {"include_obfuscation": False}),
        "tool_choice": ("auto", "none"),
        "tools": ([],),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }

    PARAM: ClassVar[str] = "input"

    model_config = example(input="Name a module of Python.", pe=SHORT, max_output_tokens=24)

    input: Input = Field(description="A text of the user, or messages.")
    instructions: str | None = Field(None, description="A system message before the input.")
    max_output_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Default: the most that the server, the context and the ranges of `auto` allow."
    )
    text: TextOptions = Field(default_factory=TextOptions, description="The format of the answer.")

    @property
    @override
    def format_structure(self) -> Structure | None:
        return None if self.text.format is None else self.text.format.structure("text.format")

    @override
    def conversation(self) -> list[dict[str, Any]]:
        before = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            return [*before, {"role": "user", "content": self.input}]
        return [*before, *(message.for_template() for message in self.input)]

    @property
    @override
    def most_tokens(self) -> tuple[str, int | None]:
        return "max_output_tokens", self.max_output_tokens


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[Any] = []


Status = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"] = "message"
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class CachedTokens(BaseModel):
    cached_tokens: int
    cache_write_tokens: int = 0


class ReasoningTokens(BaseModel):
    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens = ReasoningTokens()
    total_tokens: int


class Incomplete(BaseModel):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(BaseModel):
    """``pe`` is the encoding as it takes effect, and ``auto`` the choice of that request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    error: None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage]
    parallel_tool_calls: bool
    previous_response_id: None = None
    prompt_cache_key: str | None
    safety_identifier: str | None
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: Literal["auto"] = "auto"
    tools: list[Any] = []
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None
    user: str | None
    pe: dict[str, Any]
    auto: AutoChoice | None
