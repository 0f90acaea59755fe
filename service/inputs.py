"""Prompts and documents as requests give them: a text, token ids, or a list of either."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Discriminator, Field, StrictInt, Tag

from patches import problem
from service.policy.auto import Encoding

MOST_TOKENS = 1 << 18
"""Token ids in one list, whatever the server's own limits are."""

MOST_TEXTS = 1024
"""Texts or lists of token ids in one request."""

MOST_ENCODINGS = 256
"""Encodings in one request."""

Text = Annotated[str, Field(min_length=1)]
TokenId = Annotated[StrictInt, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MOST_TOKENS, fail_fast=True)]


def _kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "one_text"
    if isinstance(value, list):
        return "token_ids" if value and isinstance(value[0], int) else "several"
    return None


def _kind_of_item(value: Any) -> str | None:
    kind = _kind(value)
    return "token_ids" if kind == "several" else kind


_BY_KIND_OF_ITEM = Discriminator(
    _kind_of_item,
    custom_error_type="text_or_token_ids",
    custom_error_message="Input should be a text or a list of token ids",
)

_BY_KIND = Discriminator(
    _kind,
    custom_error_type="text_or_token_ids",
    custom_error_message="Input should be a text, a list of token ids, or a list of either",
)

_Ids = Annotated[TokenIds, Tag("token_ids")]
_Text = Annotated[Text, Tag("one_text")]
_Prompt = Annotated[str, Tag("one_text")]
_Several = Field(min_length=1, max_length=MOST_TEXTS, fail_fast=True)

TextOrTokens = Annotated[
    _Text | _Ids | Annotated[list[Annotated[_Text | _Ids, _BY_KIND_OF_ITEM]], _Several, Tag("several")], _BY_KIND
]
"""One text, one list of token ids, or a list of either."""

Prompts = Annotated[
    _Prompt | _Ids | Annotated[list[Annotated[_Prompt | _Ids, _BY_KIND_OF_ITEM]], _Several, Tag("several")], _BY_KIND
]
"""The same, with texts that may be empty: an answer begins behind the tokens that a tokenizer adds."""


def as_list(value: str | list[int] | list[str | list[int]]) -> list[str | list[int]]:
    """The texts and token id lists in ``value``."""
    if isinstance(value, str):
        return [value]
    return [value] if isinstance(value[0], int) else list(value)


def names_of(given: Sequence[str] | None, count: int) -> list[str]:
    """The names of ``count`` documents: those given, else their places in the field ``input``."""
    return list(given or ([f"input[{index}]" for index in range(count)] if count > 1 else ["input"]))


def one_or_several(value: Any) -> str:
    return "several" if isinstance(value, list) else "one"


def text_or_list(of: str) -> Discriminator:
    """For a union of a text (its tag is ``one``) and a list ``of`` something (``several``)."""

    def kind(value: Any) -> str | None:
        return one_or_several(value) if isinstance(value, str | list) else None

    message = f"Input should be a text or a list of {of}"
    return Discriminator(kind, custom_error_type="text_or_list", custom_error_message=message)


def matching(pattern: str, words: str) -> AfterValidator:
    """For a text that matches the whole ``pattern``; the error of others has ``words`` in place of it."""

    def check(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise problem("characters", words)
        return text

    return AfterValidator(check)


Stop = Annotated[str, Field(min_length=1, max_length=256)]
ListOfStops = Annotated[list[Stop], Field(max_length=16)]
Stops = Annotated[Annotated[Stop, Tag("one")] | Annotated[ListOfStops, Tag("several")], text_or_list("texts")]
"""A text that ends an answer, or several."""

Encodings = Annotated[
    Annotated[Encoding, Tag("one")]
    | Annotated[list[Encoding], Field(min_length=1, max_length=MOST_ENCODINGS), Tag("several")],
    Discriminator(one_or_several),
]
"""One encoding, or several to answer every prompt under each."""

TAGS = frozenset(
    {"one_text", "token_ids", "several", "one", "list", "range", "vllm", "sglang", "auto", "named", "allowed"}
    | {"as_text", "as_object", "as_schema", "a_message", "a_call", "a_result", "a_reason", "a_text"}
    | {"a_tool", "any_tool"}
)
"""Words that unions in requests add to the location of a problem."""


def as_json(value: Any) -> str:
    """``value`` as JSON, to check that it can be written.

    Raises:
        PydanticCustomError: for a number that JSON does not have.
    """
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        raise problem("not_finite", "holds a number that JSON does not have, such as NaN") from None


def is_longer(text: str, most: int) -> bool:
    """True for a text of more than ``most`` bytes of UTF-8."""
    return len(text) > most or (4 * len(text) > most and len(text.encode("utf-8", "surrogatepass")) > most)
