"""Texts that an answer may not have, as sequences of tokens (vLLM's ``bad_words``)."""

from __future__ import annotations

from fastapi.concurrency import run_in_threadpool

from service.api.generation.drawing import Drawing
from service.errors import bad_request
from service.models.registry import ServedModel
from service.models.text.tokenizing import tokenized

MOST_TOKENS = 32
"""Tokens of a bad word. Each step compares the end of the answer with words of each length."""


async def sequences(drawing: Drawing, served: ServedModel, within: str = "") -> tuple[tuple[int, ...], ...]:
    """Tokens of each bad word, alone and behind a blank. ``within`` precedes the name of the field in errors.

    Raises:
        ApiError: for a word without tokens, or with many, and words that may leave no token to draw.
    """
    return await run_in_threadpool(_sequences, drawing, served, within) if drawing.bad_words else ()


def _sequences(drawing: Drawing, served: ServedModel, within: str) -> tuple[tuple[int, ...], ...]:
    found: dict[tuple[int, ...], None] = {}
    for place, word in enumerate(drawing.bad_words):
        alone = word.lstrip(" ") or word
        spelled = [tuple(tokenized(served.tokenizer, text, add_special_tokens=False)) for text in (alone, f" {alone}")]
        field = f"{within}bad_words.{place}"
        if not spelled[0]:
            raise bad_request(f"{field}: the tokenizer of {served.name!r} has no tokens for it", field)
        if max(map(len, spelled)) > MOST_TOKENS:
            raise bad_request(f"{field}: has more than {MOST_TOKENS} tokens", field)
        found |= dict.fromkeys(tokens for tokens in spelled if tokens)
    logits = served.patch.num_logits
    drawn = tuple(tokens for tokens in found if max(tokens) < logits)
    if not drawing.leaves_some(served, (tokens[-1] for tokens in drawn)):
        field = f"{within}bad_words"
        raise bad_request(f"{field}: their last tokens must leave another one to draw", field)
    return drawn
