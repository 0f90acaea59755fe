"""Bodies of ``/v1/messages``. The client calls its tools itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from typing_extensions import override

from patches import problem
from service.api.anthropic.blocks import Texts, Turns, conversation_of
from service.api.generation.structure import STRICT, Schema, Structure
from service.api.openai.body import NOT_USED, Body, CacheControl, text_in, type_of
from service.api.openai.schemas import SHORT, ConversationBody, ModelName, TurnsBody, example
from service.api.openai.templating import Effort
from service.api.openai.tools.offer import Offer
from service.api.openai.tools.schemas import BY_GRAMMAR, MOST_TOOLS, Function, Name, NamedFunction
from service.api.openai.unsupported import NOT_SUPPORTED, only
from service.errors import bad_request
from service.inputs import ListOfStops
from service.models.text.chat import template_options
from service.models.text.response_templates import thinks
from service.policy.auto import Encoding

THINKING = ("enable_thinking", "thinking")
"""Variables of chat templates that switch reasoning on and off: Qwen's, and DeepSeek's."""


class Tool(Body):
    """A function of the client. Tools that Anthropic's servers run are not here."""

    NOT_SUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "allowed_callers": (["direct"],),
        "defer_loading": (False,),
        "eager_input_streaming": (True, False),
        "input_examples": ([],),
    }

    type: Literal["custom"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_the_client(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and fields.get("type") not in (None, "custom"):
            raise problem("tool_type", "must be 'custom': the client runs its tools, and the server none", "type")
        return fields

    name: Name
    description: str | None = None
    input_schema: Schema
    strict: bool | None = Field(None, description=f"{BY_GRAMMAR} {STRICT}")
    cache_control: CacheControl | None = Field(None, description=NOT_USED)

    @property
    def function(self) -> Function:
        return Function.model_construct(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )


class AnyToolChoice(Body):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool = Field(False, description="True: one call at most.")


class ToolChoice(Body):
    """The tool that must be called."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool = Field(True, description="False: several calls of it may come.")


def _names_tool(value: Any) -> str:
    return "a_tool" if type_of(value) == "tool" else "any_tool"


class Thinking(Body):
    """A switch of reasoning, for chat templates with a variable for it."""

    type: Literal["enabled", "disabled", "adaptive"] = Field(
        description="`adaptive` leaves it to the model, and `enabled` needs one that reasons."
    )
    budget_tokens: Annotated[int, Field(ge=1)] | None = Field(None, description=NOT_USED)
    display: Annotated[Literal["summarized"], only("summarized")] | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    json_schema: Schema = Field(alias="schema")


class OutputConfig(Body):
    NOT_SUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"task_budget": ()}

    effort: Effort | None = Field(None, description="For chat templates that read the variable `reasoning_effort`.")
    format: OutputFormat | None = Field(None, description="The answer is JSON by a schema.")


NOT_HERE: dict[str, tuple[Any, ...]] = {
    **NOT_SUPPORTED,
    **dict.fromkeys(("betas", "fallbacks", "mcp_servers"), ([],)),
    **dict.fromkeys(("billing_policy", "compaction", "container", "diagnostics", "fallback_credit_token"), ()),
    **dict.fromkeys(("inference_geo", "n", "output_format", "stop", "thread", "user_profile_id", "workspace_id"), ()),
    "context_management": ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "speed": ("standard",),
}


class MessagesBody(TurnsBody):
    """A conversation, and the tools that its answer may use."""

    NOT_SUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = NOT_HERE
    PARAM: ClassVar[str] = "messages"
    DEFAULT_EFFORT: ClassVar[str | None] = "high"

    model: ModelName | None = None
    messages: Turns = Field(description="If the last one is the assistant's, the answer continues its text.")
    system: Texts | None = Field(None, description="A text before the conversation.")
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = Field(
        None, description="Functions of the client, which the model may call."
    )
    tool_choice: (
        Annotated[
            Annotated[AnyToolChoice, Tag("any_tool")] | Annotated[ToolChoice, Tag("a_tool")],
            Discriminator(_names_tool),
        ]
        | None
    ) = Field(
        None,
        description="`auto`: the model decides. `any`: it calls some tool; `{type: tool, name: ...}`: this one. "
        "`none`: it sees no tools.",
    )
    thinking: Thinking | None = None
    output_config: OutputConfig = Field(default_factory=OutputConfig)
    cache_control: CacheControl | None = Field(None, description=NOT_USED)

    @override
    def conversation(self) -> tuple[list[dict[str, Any]], list[str]]:
        system = text_in(self.system or "")
        leads = [{"role": "system", "content": system}] if system else []
        messages, places = conversation_of(self.messages)
        return [*leads, *messages], [*("system" for _ in leads), *(f"messages.{place}" for place in places)]

    @override
    def is_open(self, messages: Sequence[dict[str, Any]]) -> bool:
        is_text = any(
            each["role"] == "assistant" and each["content"] and not each.get("tool_calls") for each in messages[-1:]
        )
        return self.continue_final_message or (is_text and not self.add_generation_prompt)

    @property
    @override
    def offer(self) -> Offer:
        functions, choice = [tool.function for tool in self.tools or []], self.tool_choice
        if isinstance(choice, ToolChoice):
            offer = Offer.of(functions, NamedFunction(name=choice.name), several=False)
            return replace(offer, several=not choice.disable_parallel_tool_use)
        wanted = {"any": "required"}.get(choice.type, choice.type) if choice else None
        return Offer.of(functions, wanted, several=not (choice and choice.disable_parallel_tool_use))

    @property
    @override
    def effort(self) -> tuple[str, str | None]:
        return "output_config.effort", self.output_config.effort

    @override
    def variables(self, tokenizer: Any) -> dict[str, Any]:
        found = super().variables(tokenizer)
        if self.thinking is None or self.thinking.type == "adaptive":
            return found
        wanted = self.thinking.type == "enabled"
        name = next((name for name in THINKING if name in template_options(tokenizer)), None)
        if name is None:
            self._check_thinking(tokenizer, wanted=wanted)
            return found
        if found.get(name, wanted) != wanted:
            raise bad_request(f"thinking: differs from chat_template_kwargs.{name}, which it means", "thinking")
        return {**found, name: wanted}

    def _check_thinking(self, tokenizer: Any, *, wanted: bool) -> None:
        """Raises:
        ApiError: for a model that always reasons, or never.
        """
        if wanted and not thinks(tokenizer):
            raise bad_request("thinking: the model does not reason; send disabled or adaptive", "thinking")
        if thinks(tokenizer) and not wanted:
            message = "thinking: the model's chat template cannot switch it off; send enabled or adaptive"
            raise bad_request(message, "thinking")


class CountRequest(MessagesBody):
    model_config = example(messages=[{"role": "user", "content": "What is a module?"}])

    pe: Encoding | None = Field(None, description="Checked and not used: the count is the same under any.")


class Metadata(Body):
    user_id: Annotated[str, Field(max_length=512)] | None = Field(None, description=NOT_USED)


class MessagesRequest(MessagesBody, ConversationBody):
    """Anthropic's messages, by the chat template of the model."""

    model_config = example(messages=[{"role": "user", "content": "What is a module?"}], pe=SHORT, max_tokens=24)

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: ListOfStops = Field(default_factory=list, description="Texts that end an answer.")
    metadata: Metadata | None = Field(None, description=NOT_USED)
    service_tier: Annotated[Literal["auto", "standard_only"], only("auto", "standard_only")] | None = None

    @override
    def stops(self) -> list[str]:
        return self.stop_sequences

    @property
    @override
    def format_structure(self) -> Structure | None:
        form, param = self.output_config.format, "output_config.format"
        return None if form is None else Structure.of_schema(form.json_schema, f"{param}.schema")

    @property
    @override
    def most_tokens(self) -> tuple[str, int | None]:
        return "max_tokens", self.max_tokens
