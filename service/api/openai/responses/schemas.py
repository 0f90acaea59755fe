"""Bodies of ``/v1/responses``. No answer is stored, and the client calls its functions itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field
from typing_extensions import override

from service.api.generation.structure import Structure
from service.api.openai.body import Body
from service.api.openai.formats import TextOptions
from service.api.openai.responses.items import Input, OutputItem, Status, conversation_of
from service.api.openai.schemas import (
    SHORT,
    Alternatives,
    ConversationBody,
    OpenAIFields,
    ParallelCalls,
    example,
)
from service.api.openai.templating import Effort
from service.api.openai.tools.offer import Offer
from service.api.openai.tools.schemas import FlatToolChoice, FlatTools
from service.api.openai.unsupported import NOT_SUPPORTED
from service.api.response_models.encodings import AutoChoice
from service.errors import bad_request

LOGPROBS = "message.output_text.logprobs"
Truncation = Literal["auto", "disabled"]
Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
MOST_INCLUDED = 16


class ReasoningOptions(Body):
    """The field ``reasoning`` of responses."""

    NOT_SUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "context": ("auto",),
        "generate_summary": (),
        "mode": ("standard",),
        "summary": (),
    }

    effort: Effort | None = Field(None, description="For chat templates that read the variable `reasoning_effort`.")


class ResponsesRequest(ParallelCalls, OpenAIFields, ConversationBody):
    """OpenAI's responses, by the chat template of the model."""

    NOT_SUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **NOT_SUPPORTED,
        **dict.fromkeys(("access_programs", "background_options", "context_management", "conversation", "image"), ()),
        **dict.fromkeys(("max_tokens", "max_tool_calls", "previous_response_id", "prompt"), ()),
        "background": (False,),
        "return_token_ids": (False,),
        "truncate_prompt_tokens": (),
        "stream_options": ({}, {"include_obfuscation": False}),
    }

    PARAM: ClassVar[str] = "input"
    LOGPROBS_PARAM: ClassVar[str] = "include"

    model_config = example(input="Name a module of Python.", pe=SHORT, max_output_tokens=24)

    input: Input = Field(description="A text of the user, or messages.")
    instructions: str | None = Field(None, description="A system message before the input.")
    max_output_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Default: the most that the server, the key, the context and the ranges of `auto` allow."
    )
    include: Annotated[list[Included], Field(max_length=MOST_INCLUDED)] = Field(
        default_factory=list,
        description="`message.output_text.logprobs`: log-probabilities of the text. Agents always send "
        "`reasoning.encrypted_content`, which has no effect: reasoning comes as text.",
    )
    top_logprobs: Alternatives | None = Field(
        None, description="Alternatives per token; needs `message.output_text.logprobs` in `include`."
    )
    tools: FlatTools | None = Field(None, description="Functions of the client, which the model may call.")
    tool_choice: FlatToolChoice | None = Field(
        None,
        description="`auto`: the model decides. `required`: it calls some function; `{type: function, name: ...}`: "
        "this one. `none`: it sees no tools. `allowed_tools`: it sees all of them and calls some only.",
    )
    truncation: Truncation = Field(
        "disabled",
        description="`auto`: the input loses items from its beginning until it fits beside the answer. Those of the "
        "system before it stay. `disabled`: too long an input is refused.",
    )
    reasoning: ReasoningOptions = Field(default_factory=ReasoningOptions, description="Of a model that reasons.")
    text: TextOptions = Field(default_factory=TextOptions, description="The format of the answer.")

    def check(self) -> None:
        """Raises:
        ApiError: for alternatives to log-probabilities that are not asked for.
        """
        if self.top_logprobs and self.alternatives is None:
            raise bad_request(f"top_logprobs: needs {LOGPROBS} in include", "top_logprobs")

    @property
    @override
    def format_structure(self) -> Structure | None:
        return None if self.text.format is None else self.text.format.structure("text.format")

    @override
    def conversation(self) -> tuple[list[dict[str, Any]], list[str]]:
        leads = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        fields = ["instructions" for _ in leads]
        if isinstance(self.input, str):
            return [*leads, {"role": "user", "content": self.input}], [*fields, "input"]
        messages, places = conversation_of(self.input)
        return [*leads, *messages], [*fields, *(f"input.{place}" for place in places)]

    @property
    @override
    def offer(self) -> Offer:
        return Offer.of(self.tools or [], self.tool_choice, several=self.parallel_tool_calls)

    @property
    @override
    def shortens(self) -> bool:
        return self.truncation == "auto"

    @property
    @override
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if LOGPROBS in self.include else None

    @property
    @override
    def effort(self) -> tuple[str, str | None]:
        return "reasoning.effort", self.reasoning.effort

    @property
    @override
    def most_tokens(self) -> tuple[str, int | None]:
        return "max_output_tokens", self.max_output_tokens


class InputTokensRequest(ResponsesRequest):
    """A request to ``/v1/responses``. Fields that change nothing about its input are checked and not used."""

    NOT_SUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {**ResponsesRequest.NOT_SUPPORTED, "personality": ()}

    model_config = example(input="Name a module of Python.")


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


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
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None = None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Truncation
    usage: ResponseUsage | None
    user: str | None
    pe: dict[str, Any]
    auto: AutoChoice | None
