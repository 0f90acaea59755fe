"""Texts to score: token ids without special tokens, and the bytes and words of each range."""

from __future__ import annotations

import bisect
import difflib
import hashlib
import re
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from importlib.resources import files
from itertools import accumulate
from typing import Any

from service.evaluation.results import DocumentInfo, Overlap
from service.models.text.tokenizing import with_ends

SPACES = re.compile(r"\s+")
CONTEXT = 4
"""Tokens decoded before a range together with it: a character has at most four bytes, hence four tokens."""


@dataclass
class Document:
    """One text. ``byte_ends`` [tokens] is the UTF-8 offset after each token, ``spaces`` the offset of each run of white
    space. Both need the text: documents of token ids alone are decoded. ``cut_from`` is the number of tokens before
    the cut.

    Special tokens have no text. Characters that a tokenizer drops count with the token after them, or the last one.
    """

    name: str
    token_ids: list[int]
    tokenizer: Any = field(repr=False)
    byte_ends: list[int] | None = field(default=None, repr=False)
    spaces: list[int] = field(default_factory=list, repr=False)
    cut_from: int | None = None
    overlap: Overlap | None = None

    @property
    def info(self) -> DocumentInfo:
        """The document as results describe it."""
        return DocumentInfo(
            name=self.name,
            tokens=len(self.token_ids),
            bytes=self.total_bytes,
            tokens_sha256=token_digest(self.token_ids),
            cut_from=self.cut_from,
            overlap=self.overlap,
        )

    def bytes_between(self, first: int, last: int) -> int:
        """UTF-8 bytes of the tokens first <= i < last."""
        if first >= last:
            return 0
        if self.byte_ends is None:
            return self._decoded(first, last, _bytes)
        return self._offset(last) - self._offset(first)

    def words_between(self, first: int, last: int) -> int:
        """Words of the tokens first <= i < last, counted as lm-evaluation-harness does. They are the pieces between
        runs of white space, the empty ones at both ends included. A word counts where the white space after it begins,
        the last one with the last token. Disjoint ranges of the whole document sum to the harness' count."""
        if first >= last:
            return 0
        ends = int(last == len(self.token_ids))
        if self.byte_ends is None:
            return self._decoded(first, last, _runs_of_space) + ends
        begins = bisect.bisect_left(self.spaces, self._offset(first))
        return bisect.bisect_left(self.spaces, self._offset(last)) - begins + ends

    def cut(self, most: int | None) -> Document:
        """The first ``most`` tokens; the document itself where it has no more, or where ``most`` is None."""
        tokens = len(self.token_ids)
        if most is None or tokens <= most:
            return self
        ends = None if self.byte_ends is None else self.byte_ends[:most]
        return replace(self, token_ids=self.token_ids[:most], byte_ends=ends, cut_from=tokens)

    def after(self, token_id: int) -> Document:
        """The same text after a special token."""
        ends = None if self.byte_ends is None else [0, *self.byte_ends]
        return replace(self, token_ids=[token_id, *self.token_ids], byte_ends=ends)

    @cached_property
    def total_bytes(self) -> int:
        return self.bytes_between(0, len(self.token_ids))

    def _offset(self, token: int) -> int:
        return self.byte_ends[token - 1] if self.byte_ends and token else 0

    def _decoded(self, first: int, last: int, count: Callable[[str], int]) -> int:
        """The difference that a range makes to the count of the text before it. Decoded alone, it would lose a leading
        space, and parts of a character would count as whole ones."""
        before = max(0, first - CONTEXT)
        known, both = (
            self.tokenizer.decode(self.token_ids[before:stop], skip_special_tokens=True) for stop in (first, last)
        )
        return count(both) - count(known)


def token_digest(token_ids: Iterable[int]) -> str:
    """SHA-256 in hex of token ids as 64-bit integers, least significant byte first."""
    ids = array("q", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return hashlib.sha256(ids).hexdigest()


def _bytes(text: str) -> int:
    return len(text.encode())


def _runs_of_space(text: str) -> int:
    return sum(1 for _ in SPACES.finditer(text))


def from_text(name: str, text: str, tokenizer: Any) -> Document:
    """Tokenize without special tokens: the protocol adds a BOS to its windows."""
    token_ids, char_ends = with_ends(tokenizer, text, add_special_tokens=False)
    at_char = [0, *accumulate(len(char.encode()) for char in text)] if not text.isascii() else range(len(text) + 1)
    # Several tokens may encode one character: all end after it, and the last one counts.
    ends = [at_char[end] for end in char_ends]
    if ends:
        ends[-1] = at_char[-1]
    return Document(name, token_ids, tokenizer, ends, [at_char[run.start()] for run in SPACES.finditer(text)])


def from_token_ids(name: str, token_ids: Sequence[int], tokenizer: Any) -> Document:
    return Document(name, list(token_ids), tokenizer)


@lru_cache(maxsize=1)
def persuasion() -> str:
    """Jane Austen, *Persuasion* (1818), in the public domain; no demo model has read it.

    The text is Project Gutenberg's no. 105 without its header, as in Debian's r-cran-janeaustenr 1.0.0-1.
    """
    return files("service.evaluation").joinpath("texts/persuasion.txt").read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def language_reference() -> str:
    """The Python language reference of the running interpreter: Python versions differ in it."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


DEFAULT_DOCUMENT = "persuasion"

BUILT_IN = {DEFAULT_DOCUMENT: persuasion, "python-reference": language_reference}
"""Name -> text of the documents that need no upload."""


FILE_NAME = re.compile(r"[^\s]{0,250}\.(txt|md|rst|tex|html?|xml|json|jsonl|csv|py|pdf|epub|gz|zip)", re.IGNORECASE)


def close_name(text: str) -> str | None:
    """The built-in document whose name ``text`` is, but for a few letters."""
    if len(text) > 255 or SPACES.search(text):
        return None
    return next(iter(difflib.get_close_matches(text.lower(), BUILT_IN, n=1, cutoff=0.7)), None)


def mistaken(text: str) -> str | None:
    """The error for a text that is a misspelt built-in name or the name of a file; None for any other text."""
    if (close := close_name(text)) is not None:
        return f"{text!r} is no built-in document: did you mean {close!r}?"
    if FILE_NAME.fullmatch(text):
        return f"{text!r} looks like the name of a file: send what is in it, or one of {', '.join(BUILT_IN)}"
    return None


@lru_cache(maxsize=8)
def built_in(name: str, tokenizer: Any) -> Document:
    """A built-in document, tokenized once per tokenizer."""
    return from_text(name, BUILT_IN[name](), tokenizer)


def doubling_lengths(trained_length: int, longest: int) -> list[int]:
    """trained_length, twice that, ... up to ``longest``; at least one length."""
    lengths = [trained_length << step for step in range(64)]
    return lengths[: bisect.bisect_right(lengths, longest)] or [longest]
