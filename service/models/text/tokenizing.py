"""Texts to token ids, with a bound on the memory that this takes.

A tokenizer needs some 300 bytes per character while it works, and a failed allocation in it aborts the process. So
texts share a budget, and their lengths are limited before they come here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

from service.sharing.stopping import check_wanted, outside_python

AT_ONCE = 2 << 20
"""Characters that are tokenized at once, on all threads; a longer text is tokenized alone."""

SMALL = 16 << 10
"""Characters up to which a text waits for no other."""

LOOK_S = 0.05
"""Interval at which a waiting text checks that its request is still wanted."""


WORD_START = "\u2581"
"""SentencePiece's space before a word. It is also put before a text, where it has none of its characters."""


class _Budget:
    def __init__(self) -> None:
        self._taken = 0
        self._changed = threading.Condition()

    @contextmanager
    def taking(self, size: int) -> Iterator[None]:
        if size <= SMALL:
            yield
            return
        with outside_python(), self._changed:
            while self._taken and self._taken + size > AT_ONCE:
                check_wanted()
                self._changed.wait(LOOK_S)
            self._taken += size
        try:
            yield
        finally:
            with self._changed:
                self._taken -= size
                self._changed.notify_all()


_budget = _Budget()


def tokenized(tokenizer: Any, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of ``text``.

    Raises:
        Stopped: when nobody wants them any more.
    """
    check_wanted()
    with _budget.taking(len(text)):
        if len(text) > SMALL and _is_plain(tokenizer):
            return _fast(tokenizer, text, add_special_tokens)
        ids: list[int] = tokenizer(
            text,
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
    return ids


def _is_plain(tokenizer: Any) -> bool:
    """True if its call is that of the library's tokenizers, without further steps."""
    from transformers import TokenizersBackend  # pages about documents are made without it

    kind = type(tokenizer)
    return (
        isinstance(tokenizer, TokenizersBackend)
        and kind.__call__ is TokenizersBackend.__call__
        and kind._encode_plus is TokenizersBackend._encode_plus
    )


def _fast(tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
    """The same ids without offsets, in a third of the time.

    Freeing the offsets of a long text would block the interpreter for a tenth of a second.
    """
    tokenizer("", verbose=False)  # sets what a call sets: no truncation, no padding
    (encoded,) = tokenizer.backend_tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoded.ids
    return ids


def with_ends(tokenizer: Any, text: str, *, add_special_tokens: bool = True) -> tuple[list[int], list[int]]:
    """(token ids, the character after each token's last one, never descending).

    Raises:
        Stopped: when nobody wants them any more.
    """
    check_wanted()
    with _budget.taking(len(text)):
        encoded = tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True, verbose=False)
        ids, places = encoded["input_ids"], encoded["offset_mapping"]
        ends = [end for _, end in places]
        start_of_word = tokenizer.convert_tokens_to_ids(WORD_START)
        for at, ((start, end), (after, _)) in enumerate(pairwise(places)):
            if ids[at] == start_of_word and start == after < end:  # put before the character of the next token
                ends[at] = start
    return ids, list(accumulate(ends, max))
