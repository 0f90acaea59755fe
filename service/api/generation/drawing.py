"""Fields that say how tokens are drawn, and which of them end an answer. Names are those of OpenAI and vLLM."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from patches import KnownFields, problem
from service.api.generation.structure import Structure, StructuredOutputs
from service.engine.request import SamplingParams
from service.errors import ApiError, bad_request
from service.inputs import Stop, Stops, TokenId
from service.models.registry import ServedModel
from service.settings import Seconds

MOST_IDS = 256
"""Token ids in one of its fields."""

MOST_ALLOWED = 1 << 14
"""Token ids that answers are drawn from."""

GREEDY = 1e-5
"""Temperatures below are greedy, as in vLLM: their quotients may be no numbers."""

Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]

Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]


def _digits(key: Any) -> Any:
    """Two spellings of one token would be two keys, of which the last one wins."""
    if isinstance(key, str) and not re.fullmatch("0|[1-9][0-9]*", key):
        raise problem("not_an_id", "must be a token id in decimal digits")
    return key


BiasedToken = Annotated[int, BeforeValidator(_digits), Field(ge=0, strict=False)]


class Limited(KnownFields):
    """The time of a request, and the requests that it shares prefixes with."""

    timeout_s: Seconds | None = Field(
        None, description="Seconds until it is given up with 504; the server's maximum when absent."
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(
        None, description="Share cached prefixes only with requests of the same API key and the same salt."
    )


class Drawing(KnownFields):
    """Sampling of a generation. Subclasses set ``stops``, the default of ``temperature`` and the range of ``top_k``."""

    temperature: Annotated[float, Field(ge=0.0, le=100.0)] = Field(0.0, description="0 is greedy.")
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = Field(0, description="0 keeps all tokens.")
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.0, description="Keep tokens with at least this share of the largest probability."
    )
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100.0)] = Field(
        1.0, description="Above 1: tokens of the prompt and the answer become less likely (CTRL's penalty)."
    )
    presence_penalty: Penalty = Field(0.0, description="Above 0: tokens of the answer become less likely.")
    frequency_penalty: Penalty = Field(0.0, description="The same, times how often they occur in the answer.")
    logit_bias: Annotated[
        dict[BiasedToken, Annotated[float, Field(ge=-100.0, le=100.0)]],
        Field(max_length=MOST_IDS),
    ] = Field(
        default_factory=dict,
        description=f"At most {MOST_IDS} token ids, each with a number that is added to its logit.",
    )
    seed: Seed | None = Field(
        None,
        description="The same seed draws the same noise in any company, so the answer is the same up to rounding.",
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MOST_IDS)] = Field(
        default_factory=list, description="Tokens that end an answer, as an end-of-text token does."
    )
    min_tokens: Annotated[int, Field(ge=0)] = Field(
        0, description="Nothing but the limit of new tokens ends an answer of fewer tokens."
    )
    include_stop_str_in_output: bool = Field(
        False, description="The text has the stop string that ends it, or the token of `stop_token_ids`."
    )
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MOST_ALLOWED)] | None = Field(
        None, description="No other tokens are drawn. An end-of-text token must be among them to end an answer."
    )
    bad_words: Annotated[list[Stop], Field(max_length=MOST_IDS)] = Field(
        default_factory=list,
        description="Tokens that would complete one of these texts are not drawn, with a blank before it or without.",
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="Answers follow a JSON schema, a regular expression or choices."
    )
    ignore_eos: bool = Field(False, description="Go on after end-of-text tokens, up to the most new tokens.")

    def stops(self) -> list[str]:
        """Texts that end an answer."""
        return []

    def structure(self) -> Structure | None:
        """The grammar of answers, if they have one.

        Raises:
            ApiError: for fields that exclude each other.
        """
        if self.structured_outputs is None:
            return None
        return self.structured_outputs.structure

    def check_tokens(self, served: ServedModel, within: str = "") -> None:
        """``within`` precedes the names of fields in errors.

        Raises:
            ApiError: for tokens that the model does not have.
        """
        vocabulary = served.patch.num_logits

        def refused(field: str, why: str) -> ApiError:
            return bad_request(f"{within}{field}: {why}", within + field)

        for field in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            if max(getattr(self, field) or (), default=0) >= vocabulary:
                raise refused(field, f"token ids of this model are 0..{vocabulary - 1}")
        if not self.leaves_some(served):
            field = "stop_token_ids" if self.allowed_token_ids is None else "allowed_token_ids"
            raise refused(field, "with min_tokens, they must leave a token to draw that ends no answer")
        if (structure := self.structure()) and (self.ignore_eos or self.min_tokens):
            field = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise refused(field, f"not with {within}{structure.param}, since an answer ends where its grammar does")

    def leaves_some(self, served: ServedModel, without: Iterable[int] = ()) -> bool:
        """True if a token is left to draw ``without`` these, and before ``min_tokens`` without those that end it."""
        ends = (*self.stop_token_ids, *served.engine.eos_token_ids) if self.min_tokens else ()
        taken = {*ends, *without}
        if self.allowed_token_ids is None:
            return len(taken) < served.patch.num_logits
        return not taken.issuperset(self.allowed_token_ids)

    def sampling(self, choice: int = 0, logprobs: int | None = None) -> SamplingParams:
        """``choice`` counts the answers to one prompt; ``logprobs`` the alternatives to report per token."""
        return SamplingParams(
            self.temperature if self.temperature >= GREEDY else 0.0,
            self.top_p,
            max(self.top_k, 0),
            None if self.seed is None else self.seed + choice,
            logprobs,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple(self.logit_bias.items()),
            stop_token_ids=tuple(self.stop_token_ids),
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
        )


class Stopped(KnownFields):
    """Texts that end an answer, by the name that OpenAI gave them."""

    stop: Stops | None = None

    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
