"""Texts of any length, and sentences hidden in them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import regex

FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""Of the passkey prompt (Mohtashami and Jaggi, arXiv:2305.16300, appendix), and RULER's repeated noise."""

_WORD = re.compile(r"\s*\S+")
_LONGEST = 100
_SCRIPTS = (
    *("Han", "Hiragana", "Katakana", "Bopomofo", "Thai", "Lao", "Khmer"),
    *("Myanmar", "Tibetan", "Javanese", "Balinese"),
)
"""They set no blanks between words."""
_BLANKLESS = "".join(rf"\p{{{script}}}" for script in _SCRIPTS)
_PIECE = regex.compile(
    rf"\s*(?:(?=[{_BLANKLESS}])\X(?:(?![\s\w\p{{Ps}}\p{{Pi}}])\X){{0,8}}|(?:(?![{_BLANKLESS}])\X){{1,{_LONGEST}}})"
)
"""A character of these scripts with the marks after it, or up to ``_LONGEST`` characters of others. A character is a
grapheme cluster (Unicode Standard Annex 29)."""
_SENTENCE_END = regex.compile(r"""(?:[.!?]["')\]»]*|(?![.!?])\p{Sentence_Terminal}["'\p{Pe}\p{Pf}]*)$""")
_LONGEST_SENTENCE = 100


@dataclass(frozen=True, eq=False)
class Haystack:
    """A text repeated without end: as published, haystacks shorter than a prompt start over."""

    text: str
    between: str = "\n\n"

    @cached_property
    def words(self) -> list[str]:
        """Each with the whitespace before it. Long words, and scripts without blanks, are in pieces."""
        words = _WORD.findall(self.between + self.text.strip())
        return [piece for word in words for piece in _pieces(word)]

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

    @cached_property
    def has_sentences(self) -> bool:
        """False for lists, logs or scripts without full stops: sentences would have over 100 words on average."""
        ends = sum(_SENTENCE_END.search(word) is not None for word in self.words)
        return len(self.words) <= _LONGEST_SENTENCE * ends

    def sentence_start(self, word: int, start: int) -> int:
        """The last word <= ``word`` and >= ``start`` that follows the end of a sentence; ``start`` where none does.

        It is ``word`` itself in a text without sentences.
        """
        words = self.words
        for index in range(word, start, -1):
            if not self.has_sentences or _SENTENCE_END.search(words[(index - 1) % len(words)]):
                return index
        return start


def _pieces(word: str) -> list[str]:
    return [word] if word.isascii() and len(word) <= _LONGEST else _PIECE.findall(word)


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
