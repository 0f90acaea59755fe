"""Parameters of one generation, and the log-probabilities that it reports."""

from __future__ import annotations

from dataclasses import dataclass

from service.engine.request.grammar import Grammar


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one generation. Temperature 0 is greedy; ``logprobs`` counts alternatives per token.

    Neither end-of-text tokens nor ``stop_token_ids`` are drawn among the first ``min_tokens``; with ``ignore_eos``
    the former end nothing. ``min_p`` keeps tokens with this share of the largest probability, at least.
    ``logit_bias`` are (token, what its logit gains). ``repetition_penalty`` divides positive logits of all tokens so
    far, and multiplies negative ones. The other penalties count the tokens of the answer. Tokens that would break the
    ``grammar``, which is of this answer alone, are not drawn. Nor are others than ``allowed_token_ids``, if there are
    some, and tokens that complete one of ``bad_words``.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    logprobs: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    def ends_at(self, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Tokens that end a generation of a model with these end-of-text tokens."""
        return self.stop_token_ids if self.ignore_eos else eos_token_ids + self.stop_token_ids

    def stop_tokens(self, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Tokens that end it only because the request says so."""
        eos = () if self.ignore_eos else eos_token_ids
        return tuple(token for token in self.stop_token_ids if token not in eos)

    @property
    def is_penalised(self) -> bool:
        """True if a token's logit loses by the tokens before it."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def is_masked(self) -> bool:
        """True if most tokens of the model may not be drawn."""
        return self.grammar is not None or self.allowed_token_ids != ()

    @property
    def needs_tokens(self) -> bool:
        """True if a token is drawn by more than the model and noise: the tokens before it must be known."""
        return self.is_penalised or self.grammar is not None or bool(self.bad_words)


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability of one generated token and of the ``top`` most likely ones, as (id, logprob)."""

    logprob: float
    top: tuple[tuple[int, float], ...]
