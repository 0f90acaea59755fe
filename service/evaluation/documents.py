"""Texts to score: token ids without special tokens, and how many bytes each range stands for."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any


@dataclass
class Document:
    """One text. ``byte_ends`` [tokens] is the UTF-8 offset after each token, where the text is known."""

    name: str
    token_ids: list[int]
    tokenizer: Any = field(repr=False)
    byte_ends: list[int] | None = field(default=None, repr=False)

    def bytes_between(self, first: int, last: int) -> int:
        """UTF-8 bytes of the tokens first <= i < last; by decoding where only token ids were given."""
        if first >= last:
            return 0
        if self.byte_ends is None:
            return len(self.tokenizer.decode(self.token_ids[first:last]).encode())
        return self.byte_ends[last - 1] - (self.byte_ends[first - 1] if first else 0)

    @cached_property
    def total_bytes(self) -> int:
        return self.bytes_between(0, len(self.token_ids))


def from_text(name: str, text: str, tokenizer: Any) -> Document:
    """Tokenize without special tokens: whether windows get a BOS is the protocol's choice."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    at_char = [0, *accumulate(len(char.encode()) for char in text)] if not text.isascii() else range(len(text) + 1)
    # Several tokens may stand for parts of one character: they all end after it, the last one counts.
    ends = list(accumulate((at_char[end] for _, end in encoded["offset_mapping"]), max))
    return Document(name, encoded["input_ids"], tokenizer, ends)


def from_token_ids(name: str, token_ids: Sequence[int], tokenizer: Any) -> Document:
    return Document(name, list(token_ids), tokenizer)


@lru_cache(maxsize=1)
def language_reference() -> str:
    """The Python language reference as the running interpreter carries it: text every machine has."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


BUILT_IN = {"python-reference": language_reference}
"""Name -> text of the documents that need no upload."""


@lru_cache(maxsize=8)
def built_in(name: str, tokenizer: Any) -> Document:
    """A built-in document, tokenized once per tokenizer."""
    return from_text(name, BUILT_IN[name](), tokenizer)


def doubling_lengths(trained_length: int, longest: int) -> list[int]:
    """trained_length, twice that, ... up to ``longest``; at least one length."""
    lengths = [trained_length << step for step in range(64)]
    return lengths[: bisect.bisect_right(lengths, longest)] or [longest]
