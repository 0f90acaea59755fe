"""From a checked request to its choices, piece by piece: what streams send and what whole answers join."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from service.api.openai.jobs import Job
from service.api.openai.schemas import FinishReason
from service.api.text import TextStream
from service.engine.request import SamplingParams, TokenLogprobs


@dataclass(frozen=True)
class Token:
    """A token of a choice, the offset of its text in the choice's text, and its log-probabilities."""

    token_id: int
    start: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class Piece:
    """What one step adds to a choice. ``completion_tokens`` counts all that were generated so far."""

    text: str
    tokens: list[Token]
    finish_reason: FinishReason | None
    completion_tokens: int


class Pieces:
    """Cuts a growing list of tokens into pieces: text that is final, and the tokens that lie in it."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], offset: int = 0, min_tokens: int = 0) -> None:
        self._text = TextStream(tokenizer, stops, min_tokens)
        self._offset = offset
        self._ends: list[int] = []
        self._sent = 0

    def take(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], finish_reason: str | None) -> Piece:
        """``token_ids`` and ``logprobs`` (empty when nobody asked) hold everything so far."""
        text = ""
        while len(self._ends) < len(token_ids) and not self._text.stopped:
            text += self._text.push(token_ids[: len(self._ends) + 1], final=False)
            self._ends.append(len(self._text.text))
        if finish_reason is not None:
            text += self._text.push(token_ids, final=True)  # what was held back
        ended: FinishReason | None = None
        if finish_reason is not None or self._text.stopped:
            ended = "stop" if self._text.stopped or finish_reason == "stop" else "length"
        tokens = []
        while self._sent < len(self._ends) and self._may_be_sent(ended is not None):
            start = self._ends[self._sent - 1] if self._sent else 0
            own = logprobs[self._sent] if logprobs else None
            tokens.append(Token(token_ids[self._sent], self._offset + start, own))
            self._sent += 1
        return Piece(text, tokens, ended, len(token_ids))

    def _may_be_sent(self, ended: bool) -> bool:
        """Whether the next token's text is out; at the end, whether it begins before a stop string."""
        if ended:
            return not self._text.stopped or (self._ends[self._sent - 1] if self._sent else 0) < len(self._text.text)
        return self._ends[self._sent] <= self._text.shown


async def generated(job: Job, choice: int, sampling: SamplingParams, offset: int = 0) -> AsyncGenerator[Piece]:
    """Pieces of one answer, the last of them with a finish reason. ``offset`` is where its text begins."""
    target = job.named.target
    pieces = Pieces(target.tokenizer, job.wanted.stops, offset, sampling.min_tokens)
    steps = target.engine.generate(
        job.prompt.token_ids,
        job.named.method,
        sampling,
        job.max_tokens,
        ticket=job.tickets[choice],
        cache_salt=job.wanted.cache_salt,
    )
    async with aclosing(steps) as generations:
        async for generation in generations:
            piece = pieces.take(generation.token_ids, generation.logprobs, generation.finish_reason)
            if piece.finish_reason is not None:
                generation.finish_reason = piece.finish_reason  # a stop string ends it for the engine's count too
            yield piece
            if piece.finish_reason is not None:
                break


def only(job: Job, token_id: int, logprobs: TokenLogprobs, offset: int, ignore_eos: bool) -> Piece:
    """An answer of one token that is already known: what scoring found most likely after the prompt."""
    target = job.named.target
    ending = "stop" if token_id in target.engine.eos_token_ids and not ignore_eos else "length"
    return Pieces(target.tokenizer, job.wanted.stops, offset).take([token_id], [logprobs], ending)
