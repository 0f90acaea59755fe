"""Prompts of at most a given length, with the expected answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from service.models.text.tokenizing import tokenized


@dataclass(frozen=True, eq=False)
class Draft:
    """A prompt with variable filler: ``text(n)`` has n pieces of it, and the rest is the same for every n.

    ``answer`` is the expected text; ``expected`` are the strings to find in at most ``new_tokens`` tokens.
    """

    name: str
    text: Callable[[int], str]
    answer: str
    expected: tuple[str, ...]
    new_tokens: int


@dataclass(frozen=True, eq=False)
class Sample:
    """A draft with ``pieces`` of filler: ``prompt_ids`` int64 [n] with its BOS, ``answer_ids`` int64 [m]."""

    draft: Draft = field(repr=False)
    pieces: int
    prompt_ids: np.ndarray
    answer_ids: np.ndarray

    @property
    def name(self) -> str:
        return self.draft.name

    @property
    def expected(self) -> tuple[str, ...]:
        return self.draft.expected

    @property
    def new_tokens(self) -> int:
        return self.draft.new_tokens

    @cached_property
    def text(self) -> str:
        """The prompt without its BOS."""
        return self.draft.text(self.pieces)

    @property
    def tokens(self) -> int:
        """Tokens that are read: all but the last one of the answer and of the continuation."""
        return len(self.prompt_ids) + len(self.answer_ids) - 1 + self.new_tokens - 1

    @property
    def length(self) -> int:
        """Tokens of the prompt and of what follows it, as lengths count them."""
        return len(self.prompt_ids) + max(self.new_tokens, len(self.answer_ids))


@dataclass(frozen=True, eq=False)
class PromptTokenizer:
    """``bos`` is the token that every prompt starts with. Lengths count it, the prompt, and the tokens that are
    generated, or those of the answer where they are more."""

    tokenizer: Any = field(repr=False)
    bos: int | None

    def ids(self, text: str) -> list[int]:
        found = tokenized(self.tokenizer, text, add_special_tokens=False)
        return found if self.bos is None else [self.bos, *found]

    def answer_ids(self, prompt: str, answer: str) -> list[int]:
        """Tokens of ``answer`` as they follow ``prompt``; on their own where the tokenizer joins the two."""
        before, whole = self.ids(prompt), self.ids(prompt + answer)
        if whole[: len(before)] == before and len(whole) > len(before):
            return whole[len(before) :]
        return tokenized(self.tokenizer, answer, add_special_tokens=False)

    def smallest(self, draft: Draft) -> int:
        """The shortest length at which ``draft`` fits."""
        prompt = draft.text(0)
        return len(self.ids(prompt)) + max(draft.new_tokens, len(self.answer_ids(prompt, draft.answer)))

    def sample(self, draft: Draft, length: int) -> Sample:
        """``draft`` with as much filler as fits into ``length``, which must be at least its smallest."""
        answer_ids = self.answer_ids(draft.text(0), draft.answer)
        room = length - max(draft.new_tokens, len(answer_ids))
        pieces, prompt_ids = _longest(lambda pieces: self.ids(draft.text(pieces)), room)
        return Sample(draft, pieces, np.array(prompt_ids, np.int64), np.array(answer_ids, np.int64))


def _longest(ids: Callable[[int], list[int]], room: int) -> tuple[int, list[int]]:
    """n and the longest ``ids(n)`` of at most ``room`` tokens.

    The search follows the tokens per piece so far, and bisects after eight tries. A token may have several pieces, as
    of Chinese; it takes up to 16 pieces for each.
    """
    fits, beyond, best = 0, room + 1, ids(0)
    empty, guess, tries, exceeded = len(best), room // 32, 0, False
    while beyond - fits > 1:
        tries += 1
        pieces = min(max(guess, fits + 1), beyond - 1) if tries <= 8 else (fits + beyond) // 2
        found = ids(pieces)
        if len(found) <= room:
            fits, best = pieces, found
            if fits == beyond - 1 and not exceeded:
                beyond = min(2 * beyond, 16 * room + 1)
        else:
            beyond, exceeded = pieces, True
        guess = int((room - empty) * pieces / max(len(found) - empty, 1))
    return fits, best
