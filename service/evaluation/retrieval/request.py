"""The bodies of the passkey and the needle evaluation."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from patches import examples, problem
from service.evaluation.documents import DEFAULT_DOCUMENT
from service.evaluation.request import DocumentsRequest, Seed
from service.inputs import TextOrTokens

NewTokens = Annotated[int, Field(ge=1, le=4096)]
Samples = Annotated[int, Field(ge=1, le=1000)]
Sentence = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=4000)]


class DepthRequest(DocumentsRequest):
    """Fields of both evaluations: a grid of lengths and depths."""

    writes_prompts: ClassVar[bool] = True

    depths: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(min_length=1, max_length=101)] = Field(
        default=[0.0, 0.25, 0.5, 0.75, 1.0],
        description="Share of the haystack before the hidden text.",
    )
    samples: Samples = Field(3, description="Prompts per length and depth, the same at every length.")
    seed: Seed = Field(0, description="Seed of the keys and of the haystack's start in the documents.")


class PasskeyRequest(DepthRequest):
    """A random number hidden in filler, by length and depth; several encodings in one call.

    A length counts the prompt, its BOS and the new tokens. Lengths double from the trained one up to 4 times it when
    absent.
    """

    evaluation: Literal["passkey"] = "passkey"
    digits: Annotated[int, Field(ge=1, le=64)] = Field(
        5, description="Digits of the key. Short keys are easily copied: 36 digits separate methods that 5 do not."
    )
    max_new_tokens: NewTokens | None = Field(None, description="Tokens to generate; the digits and 5 when absent.")
    input: TextOrTokens | None = Field(
        None,
        description="Haystack: a text, token ids, a list of either, or the name of a built-in document. "
        "When absent: the published filler.",
    )

    @model_validator(mode="after")
    def _only_documents_are_cut(self) -> Self:
        if self.max_tokens is not None and self.input is None:
            why = "max_tokens cuts documents: the published filler takes as much as a prompt needs"
            raise problem("without_effect", why, "max_tokens")
        return self

    def texts(self) -> list[str | list[int]]:
        return [] if self.input is None else super().texts()

    @classmethod
    def example(cls) -> dict[str, Any]:
        return {
            "methods": examples(),
            "lengths": [256, 512, 1024],
            "depths": [0.0, 0.5, 1.0],
            "samples": 1,
        }


class NeedleRequest(DepthRequest):
    """A sentence hidden in unrelated documents, by length and depth; several encodings in one call.

    A length counts the prompt, its BOS and the new tokens. Lengths double from the trained one up to 4 times it when
    absent.
    """

    evaluation: Literal["needle"] = "needle"
    input: TextOrTokens = Field(
        DEFAULT_DOCUMENT,
        description="Haystack: a text, token ids, a list of either, or the name of a built-in document. "
        "Several are joined; a longer prompt repeats them from the start.",
    )
    needle: Sentence = Field(
        "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day.",
        description="The hidden text, as whole sentences.",
    )
    question: Sentence = Field(
        "What is the best thing to do in San Francisco? The best thing to do in San Francisco is",
        description="The prompt's end, which the answer continues.",
    )
    expected: Annotated[list[Sentence], Field(min_length=1, max_length=32)] = Field(
        default=["eat a sandwich", "sit in Dolores Park", "sunny day"],
        description="Strings that the continuation should contain; the haystack must not.",
    )
    answer: Sentence | None = Field(
        None,
        description="The text whose likelihood after the question is measured. When absent: the needle from the first "
        "to the last expected string. If the needle lacks one: these strings with commas.",
    )
    max_new_tokens: NewTokens = Field(32, description="Tokens to generate.")

    @model_validator(mode="after")
    def _another_needle_has_another_answer(self) -> Self:
        given = self.model_fields_set
        needle = self.needle.lower()
        if "needle" in given and "expected" not in given and not any(part.lower() in needle for part in self.expected):
            why = "required: the needle has none of the default strings, so no answer could have them"
            raise problem("no_answer", why, "expected")
        return self

    @classmethod
    def example(cls) -> dict[str, Any]:
        return {
            "input": DEFAULT_DOCUMENT,
            "methods": examples(),
            "lengths": [256, 512, 1024],
            "depths": [0.0, 0.5, 1.0],
            "samples": 1,
            "max_new_tokens": 16,
        }
