"""Work that a request asks for, whatever its route."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from service.api.generation.structure import Structure

Side = Literal["left", "right"]


@dataclass(frozen=True)
class Kept:
    """So many ``tokens`` of a prompt, or as many as fit for -1: the others are cut from this ``side``."""

    tokens: int
    side: Side


@dataclass(frozen=True)
class Wanted:
    """Work that a request asks for each of its prompts.

    ``max_tokens`` came in the field ``most_param``. None is as many as the server, the API key, the context and the
    ranges of ``auto`` allow. ``answers`` counts generations, and ``scored`` says whether the prompt is scored,
    ``echoed`` whether its text is needed. Answers follow the grammar of ``structure``; their text has special tokens
    only ``with_special_tokens``, and what ended it only ``with_stop``. ``alternatives``, by the field
    ``logprobs_param``, are reported for every token, and ``copies`` times where the prompt is echoed. ``param`` is the
    field that prompts came in. ``min_tokens`` is how many tokens an answer must have room for. ``bad_words`` are
    sequences of tokens that answers may not have. A prompt ``keeps`` a part of its tokens.
    """

    max_tokens: int | None
    answers: int
    stops: list[str]
    scored: bool = False
    alternatives: int | None = None
    copies: int = 0
    echoed: bool = False
    param: str = "prompt"
    add_special_tokens: bool = True
    cache_salt: str | None = None
    min_tokens: int = 0
    keeps: Kept | None = None
    structure: Structure | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    with_special_tokens: bool = False
    with_stop: bool = False
    most_param: str = "max_tokens"
    logprobs_param: str = "logprobs"
