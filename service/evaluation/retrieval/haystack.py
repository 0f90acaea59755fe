"""Texts of any length, and sentences hidden in them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""Of the passkey prompt (Mohtashami and Jaggi, arXiv:2305.16300, appendix), and RULER's repeated noise."""

_WORD = re.compile(r"\s*\S+")
_SENTENCE_END = re.compile(r"""[.!?]["')\]]*$""")


@dataclass(frozen=True, eq=False)
class Haystack:
    """A text repeated without end: as published, haystacks shorter than a prompt start over."""

    text: str
    between: str = "\n\n"

    @cached_property
    def words(self) -> list[str]:
        """Each with the whitespace before it."""
        return _WORD.findall(self.between + self.text.strip())

    def cut(self, start: int, count: int) -> str:
        """``count`` words from word ``start`` on."""
        words, found = self.words, []
        position = start % len(words)
        while count > 0:
            part = words[position : position + count]
            found.extend(part)
            count -= len(part)
            position = 0
        return "".join(found).strip()

    def sentence_start(self, word: int, start: int) -> int:
        """The last word <= ``word`` and >= ``start`` that follows the end of a sentence; ``start`` where none does."""
        words = self.words
        for index in range(word, start, -1):
            if _SENTENCE_END.search(words[(index - 1) % len(words)]):
                return index
        return start


class Hidden(NamedTuple):
    """A sentence, and where it goes as a fraction of the haystack before it: 0 at its start, 1 at its end."""

    depth: float
    sentence: str


def with_hidden(haystack: Haystack, start: int, count: int, hidden: Sequence[Hidden], between: str = " ") -> str:
    """``count`` words of ``haystack`` from ``start`` on, with sentences between its sentences.

    A sentence goes to its depth in words, moved back to the start of a sentence. Kamradt's LLMTest_NeedleInAHaystack
    moves back to a period. At depth 1 the sentence is the last. Sentences of one depth keep their order.
    ``between`` sets them off.
    """
    parts, done = [], start
    for depth, sentence in sorted(hidden, key=lambda one: one.depth):
        wanted = start + round(depth * count)
        here = wanted if depth == 1 else haystack.sentence_start(wanted, done)
        parts += [haystack.cut(done, here - done), sentence]
        done = here
    parts.append(haystack.cut(done, start + count - done))
    return between.join(part for part in parts if part)
