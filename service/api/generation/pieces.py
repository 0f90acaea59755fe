"""From growing lists of tokens to pieces of text: streams send them one by one, whole answers join them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from service.api.generation.text import TextStream
from service.engine.generation import Generation
from service.engine.request import TokenLogprobs

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Token:
    """A token of an answer, the offset of its text in the answer's text, and its log-probabilities."""

    token_id: int
    start: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class Piece:
    """The text and tokens that one step adds to an answer, and the generation so far: empty where none runs.

    ``stop`` is the stop string that has ended the answer, and ``stop_token`` the token of the request that has.
    """

    text: str
    tokens: list[Token]
    finish_reason: FinishReason | None
    generation: Generation = field(default_factory=Generation)
    stop: str | None = None
    stop_token: int | None = None

    @property
    def stop_reason(self) -> str | int | None:
        """The end that the request has asked for, as in vLLM: a stop string goes before a token."""
        return self.stop_token if self.stop is None else self.stop


class Pieces:
    """Cuts a growing list of tokens into pieces: text that is final, and the tokens that lie in it.

    A last token of ``silent`` has no text, as in vLLM, and one of ``stop_tokens`` is the reason for the end. ``offset``
    is where the answer's text begins.
    """

    def __init__(
        self, text: TextStream, offset: int = 0, silent: Sequence[int] = (), stop_tokens: Sequence[int] = ()
    ) -> None:
        self._text = text
        self._offset, self._silent, self._stop_tokens = offset, silent, stop_tokens
        self._ends: list[int] = []
        self._sent = 0

    def take(self, generation: Generation) -> Piece:
        """The piece that the generation's new tokens make."""
        token_ids, logprobs, finish_reason = generation.token_ids, generation.logprobs, generation.finish_reason
        text = ""
        ends_silently = finish_reason == "stop" and token_ids[-1] in self._silent
        spoken = token_ids[:-1] if ends_silently else token_ids
        while len(self._ends) < len(token_ids) and not self._text.stopped:
            text += self._text.push(spoken[: len(self._ends) + 1], final=False)
            self._ends.append(self._text.end)
        if finish_reason is not None:
            text += self._text.push(spoken, final=True)  # text that could have begun a stop string
        ended: FinishReason | None = None
        if finish_reason is not None or self._text.stopped:
            ended = "stop" if self._text.stopped or finish_reason == "stop" else "length"
        tokens = []
        while self._sent < len(self._ends) and self._may_be_sent(ended is not None):
            start = self._ends[self._sent - 1] if self._sent else 0
            own = logprobs[self._sent] if logprobs else None
            tokens.append(Token(token_ids[self._sent], self._offset + start, own))
            self._sent += 1
        is_asked = finish_reason == "stop" and token_ids[-1] in self._stop_tokens
        return Piece(text, tokens, ended, generation, self._text.stop, token_ids[-1] if is_asked else None)

    def _may_be_sent(self, ended: bool) -> bool:
        """True if the next token's text has been sent; at the end, if it begins before a stop string."""
        if ended:
            return not self._text.stopped or (self._ends[self._sent - 1] if self._sent else 0) < len(self._text.text)
        return self._ends[self._sent] <= self._text.shown
