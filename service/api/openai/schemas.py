"""Bodies of the OpenAI-compatible routes. Every accepted field takes effect, but for hints, whose descriptions say so.

Any other is refused by name. Those of OpenAI and vLLM pass with a neutral value, for clients that always send them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field
from typing_extensions import override

from patches import examples, to_shorthand
from service.api.generation.drawing import Drawing, Limited, Seed, Stopped
from service.api.generation.structure import Structure
from service.api.generation.wanted import Kept, Side
from service.api.openai.body import NOT_USED, Body
from service.api.openai.formats import ResponseFormat
from service.api.openai.messages import Messages
from service.api.openai.templating import Effort, Templating
from service.api.openai.tools.offer import Offer
from service.api.openai.tools.schemas import ToolChoice, Tools
from service.api.openai.unsupported import only
from service.errors import bad_request
from service.inputs import Prompts
from service.models.registry import ServedModel
from service.policy.auto import Encoding

ModelName = Annotated[str, Field(max_length=1024)]
Alternatives = Annotated[int, Field(ge=0, le=20)]


class OpenAIDrawing(Body, Drawing):
    """Sampling with OpenAI's defaults."""

    temperature: Annotated[float, Field(ge=0.0, le=100.0)] = Field(1.0, description="0 is greedy.")
    top_k: Annotated[int, Field(ge=-1)] = Field(0, description="0 and -1 keep all tokens.")
    seed: Seed | None = Field(
        None,
        description="The same seed draws the same noise in any company, so the answer is the same up to rounding. "
        "Choice i draws with seed + i.",
    )


class Asked(OpenAIDrawing, Limited):
    """Fields of every route that generates."""

    model: ModelName | None = Field(
        None,
        description="A served model, or `<model>@<encoding>` as in `<model>@yarn:4` or `<model>@auto`; the first model "
        "when absent.",
    )
    pe: Encoding | None = Field(
        None, description="The positional encoding: a short form, `auto` or an object; the model's own when absent."
    )
    stream: bool = False

    @property
    def format_structure(self) -> Structure | None:
        """The grammar that OpenAI's own field asks for."""
        return None

    @property
    def keeps(self) -> Kept | None:
        """Tokens that a prompt keeps at most."""
        return None

    @override
    def structure(self) -> Structure | None:
        own, theirs = super().structure(), self.format_structure
        if own and theirs:
            raise bad_request(f"structured_outputs: not with {theirs.param}", "structured_outputs")
        return own or theirs


class OpenAIFields(Stopped, Body):
    """Fields of the routes of OpenAI alone."""

    user: str | None = Field(None, description=NOT_USED)
    metadata: dict[str, str] | None = Field(None, description=NOT_USED)
    safety_identifier: str | None = Field(None, description=NOT_USED)
    prompt_cache_key: str | None = Field(None, description=NOT_USED)
    store: Annotated[bool, only(False)] | None = None
    service_tier: Annotated[Literal["auto", "default"], only("auto", "default")] | None = None


class ParallelCalls(Body):
    """The field of OpenAI's routes of conversations."""

    parallel_tool_calls: bool | None = Field(None, description="False: one call at most.")


class StreamOptions(Body):
    include_usage: bool = Field(False, description="A last chunk without choices carries the usage of the request.")
    continuous_usage_stats: bool = Field(
        False, description="Every chunk carries that of its choice so far; needs `include_usage`."
    )
    include_obfuscation: Annotated[bool, only(False)] | None = None


class GenerationBody(OpenAIFields, Asked):
    """Fields shared by completions and chats."""

    n: Annotated[int, Field(ge=1, le=128)] = Field(1, description="Answers per prompt.")
    stream_options: StreamOptions | None = None
    return_token_ids: bool = Field(
        False, description="The answer has `prompt_token_ids`, and each choice the `token_ids` that it was drawn as."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = Field(
        None,
        description="Keep this many of the last tokens of a prompt, or -1 for as many as fit beside the answer. A BOS "
        "at its beginning stays, and counts.",
    )
    truncation_side: Side = Field(
        "left", description="The end that is cut, with `truncate_prompt_tokens`: `right` keeps the first tokens."
    )
    modalities: Annotated[list[str], only(["text"], [])] | None = None
    response_format: ResponseFormat | None = Field(
        None, description="Text, any JSON object (`json_object`), or JSON by a schema (`json_schema`)."
    )

    def check(self) -> None:
        """Raises:
        ApiError: for fields that exclude each other.
        """
        if self.truncate_prompt_tokens == 0:
            raise bad_request("truncate_prompt_tokens: must be -1 or at least 1, not 0", "truncate_prompt_tokens")
        if self.truncation_side == "right" and self.truncate_prompt_tokens is None:
            raise bad_request("truncation_side: only with truncate_prompt_tokens", "truncation_side")
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options: only with stream", "stream_options")
        if self.streams.continuous_usage_stats and not self.streams.include_usage:
            message = "stream_options.continuous_usage_stats: needs include_usage"
            raise bad_request(message, "stream_options.continuous_usage_stats")

    @property
    @override
    def format_structure(self) -> Structure | None:
        return None if self.response_format is None else self.response_format.structure("response_format")

    @property
    @override
    def keeps(self) -> Kept | None:
        most = self.truncate_prompt_tokens
        return None if most is None else Kept(most, self.truncation_side)

    @property
    def streams(self) -> StreamOptions:
        return self.stream_options or StreamOptions()


SHORT = to_shorthand(examples()[1])
PROMPT = "The import statement"


def example(**body: Any) -> ConfigDict:
    """Of a body, for the documentation."""
    return ConfigDict(json_schema_extra={"examples": [body]})


class CompletionRequest(GenerationBody):
    """OpenAI's legacy completions: the route that evaluation harnesses score prompts with."""

    model_config = example(prompt=PROMPT, pe=SHORT, max_tokens=24, temperature=0)

    prompt: Prompts = Field(
        description="A text, token ids, or a list of either. Texts get what the tokenizer adds; token ids get nothing. "
        "An empty text needs a tokenizer that adds a BOS."
    )
    max_tokens: Annotated[int, Field(ge=0)] = Field(16, description="0 only with `echo` or `prompt_logprobs`.")
    echo: bool = Field(False, description="Put the prompt before the answer, in `text` and in `logprobs`.")
    logprobs: Alternatives | None = Field(None, description="Report each token and this many alternatives.")
    prompt_logprobs: Alternatives | None = Field(
        None, description="Report each prompt token and this many alternatives, with ranks. Not with `stream`."
    )
    add_special_tokens: bool = Field(True, description="Texts get the special tokens that the tokenizer adds.")
    parallel_tool_calls: bool | None = Field(None, description=NOT_USED)
    suffix: Annotated[str, Field(max_length=0), only("")] | None = None
    best_of: Annotated[int, Field(ge=1, le=1), only(1)] | None = None

    def check(self) -> None:
        super().check()
        if self.prompt_logprobs is not None and self.stream:
            raise bad_request("prompt_logprobs: not with stream", "prompt_logprobs")
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise bad_request("max_tokens: at least 1 without echo or prompt_logprobs", "max_tokens")

    @property
    def scores_prompt(self) -> bool:
        """True if the answer has log-probabilities of the prompt."""
        return self.prompt_logprobs is not None or (self.echo and self.logprobs is not None)

    @property
    def alternatives(self) -> int | None:
        """The most alternatives that are reported of any token; None where no log-probabilities are."""
        asked = [count for count in (self.logprobs, self.prompt_logprobs) if count is not None]
        return max(asked, default=None)

    @property
    def scores_answer(self) -> bool:
        """True if scoring the prompt yields the answer too: the one greedy token that harnesses want."""
        changes = self.logit_bias or self.min_tokens or self.sampling().is_penalised or self.structure()
        bounds = self.allowed_token_ids or self.bad_words
        return self.scores_prompt and self.max_tokens == 1 and self.temperature == 0 and not (changes or bounds)


class TurnsBody(Templating, ABC):
    """A conversation, whose messages come in the field ``PARAM``."""

    PARAM: ClassVar[str]

    @abstractmethod
    def conversation(self) -> tuple[list[dict[str, Any]], list[str]]:
        """The messages for chat templates, and the field of each."""

    @property
    def offer(self) -> Offer:
        """Functions that the model may call.

        Raises:
            ApiError: for wrong ones.
        """
        return Offer()

    def written(self, served: ServedModel, places: Sequence[int] | None = None) -> str:
        """The conversation, or its messages at ``places``, with the functions, by the chat template of ``served``.

        Raises:
            ApiError: as ``templated``.
        """
        messages, fields = self.conversation()
        if places is not None:
            messages, fields = [messages[at] for at in places], [fields[at] for at in places]
        return self.templated(messages, served, self.PARAM, self.offer.for_template(), fields)


class ConversationBody(TurnsBody, Asked):
    """Fields of routes that answer conversations. ``LOGPROBS_PARAM`` is the one that asks for log-probabilities."""

    LOGPROBS_PARAM: ClassVar[str] = "logprobs"

    @override
    def structure(self) -> Structure | None:
        """As ``Asked.structure``. OpenAI's own field forms texts: calls that must come are none."""
        if not self.offer.must:
            return super().structure()
        if self.structured_outputs is not None:
            param = self.structured_outputs.structure.param
            raise bad_request(f"{param}: not with a tool_choice that makes the answer calls", param)
        return None

    @property
    @abstractmethod
    def most_tokens(self) -> tuple[str, int | None]:
        """The field of the most new tokens, and its value."""

    @property
    def shortens(self) -> bool:
        """True if the conversation may lose its beginning to fit."""
        return False

    @property
    def answers(self) -> int:
        """Answers to the conversation."""
        return 1

    @property
    def alternatives(self) -> int | None:
        """Alternatives to report per token; None without log-probabilities."""
        return None


class ChatRequest(ParallelCalls, ConversationBody, GenerationBody):
    """OpenAI's chat completions, by the chat template of the model."""

    model_config = example(messages=[{"role": "user", "content": "What is a module?"}], pe=SHORT, max_tokens=24)

    PARAM: ClassVar[str] = "messages"

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Default: the most that the server, the key, the context and the ranges of `auto` allow."
    )
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="The older name of the same, which counts without it. Evaluation harnesses send both."
    )
    logprobs: bool = False
    top_logprobs: Alternatives | None = Field(None, description="Alternatives per token; needs `logprobs`.")
    reasoning_effort: Effort | None = Field(None, description="For chat templates that read this variable.")

    tools: Tools | None = Field(None, description="Functions of the client, which the model may call.")
    tool_choice: ToolChoice | None = Field(
        None,
        description="`auto`: the model decides. `required`: it calls some function; `{type: function, function: {name: "
        "...}}`: this one. `none`: it sees no tools. `allowed_tools`: it sees all of them and calls some only.",
    )

    @property
    @override
    def offer(self) -> Offer:
        functions = [tool.function for tool in self.tools or []]
        return Offer.of(functions, self.tool_choice, several=self.parallel_tool_calls)

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs: needs logprobs", "top_logprobs")

    @override
    def conversation(self) -> tuple[list[dict[str, Any]], list[str]]:
        messages = [message.for_template() for message in self.messages]
        return messages, [f"messages.{place}" for place in range(len(messages))]

    @property
    @override
    def most_tokens(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    @override
    def effort(self) -> tuple[str, str | None]:
        return "reasoning_effort", self.reasoning_effort

    @property
    @override
    def answers(self) -> int:
        return self.n

    @property
    @override
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
