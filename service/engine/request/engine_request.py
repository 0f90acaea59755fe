"""One generation as the engine sees it: tokens, a slot, how to sample. No text and no HTTP."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from service.engine.request.bad_words import BadWords
from service.engine.request.grammar import Grammar, GrammarFailed
from service.engine.request.occurrences import Occurrences
from service.engine.request.params import SamplingParams, TokenLogprobs

_numbers = itertools.count()


@dataclass(eq=False)
class EngineRequest:
    """State shared between the event loop, which creates it, and the generation thread, which samples.

    ``slot`` is in use from admission to the end. ``cache_key`` separates the prefix cache: requests share blocks only
    where it is equal. ``on_prefill`` is called on the generation thread with the prompt tokens done, after every chunk
    but the last. ``cached_tokens`` of the prompt were found in the prefix cache; ``failure`` is why this request failed
    alone; ``tenant`` sent it. ``sink_window`` counts the first and the last keys that its queries reach, None for all.
    Pages of the other keys are given back. ``eos_token_ids`` are the model's end-of-text tokens. ``generated`` counts
    the tokens before the one that is drawn; with ``noise_seed``, 64 bits, it decides the noise of that token. ``sound``
    counts the tokens before its grammar failed. ``barred`` are tokens int64 [n] that would complete one of its bad
    words.
    """

    prompt_ids: list[int]
    slot: int
    cache_key: object
    max_new_tokens: int
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    request_id: str = field(default_factory=lambda: f"gen-{next(_numbers)}")
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    noise_seed: int = field(init=False)
    on_prefill: Callable[[int], object] | None = None
    cached_tokens: int = 0
    failure: Exception | None = None
    tenant: str = ""
    sink_window: tuple[int, int] | None = None
    generated: int = 0
    sound: int | None = None
    barred: np.ndarray | None = None

    @property
    def ends_at(self) -> tuple[int, ...]:
        """Tokens that end this generation."""
        return self.sampling.ends_at(self.eos_token_ids)

    @property
    def is_held_back(self) -> bool:
        """True if some token may not be the next one, whatever its logit."""
        early = self.generated < self.sampling.min_tokens and len(self.enders) > 0
        return early or self.barred is not None

    @property
    def held_back(self) -> np.ndarray:
        """These tokens int64 [n]."""
        early = self.enders if self.generated < self.sampling.min_tokens else self.enders[:0]
        return early if self.barred is None else np.concatenate((early, self.barred))

    @property
    def grammar(self) -> Grammar | None:
        """The one that the answer follows, at the answer's end."""
        return self.sampling.grammar

    @cached_property
    def occurrences(self) -> Occurrences:
        """Those of penalised tokens."""
        return Occurrences(self.prompt_ids if self.sampling.repetition_penalty != 1 else [])

    @cached_property
    def enders(self) -> np.ndarray:
        """Tokens int64 [n] that are held back before ``min_tokens``."""
        return np.array(self.eos_token_ids + self.sampling.stop_token_ids, np.int64)

    @cached_property
    def biases(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int64 [n], and the float32 [n] that their logits gain."""
        tokens, gains = zip(*self.sampling.logit_bias, strict=True)
        return np.array(tokens, np.int64), np.array(gains, np.float32)

    @cached_property
    def bad_words(self) -> BadWords:
        return BadWords(self.sampling.bad_words)

    @cached_property
    def listed(self) -> np.ndarray:
        """Tokens int64 [n] that alone are allowed, if there are some."""
        return np.array(self.sampling.allowed_token_ids, np.int64)

    def allowed(self, vocabulary: int) -> np.ndarray:
        """Tokens bool [vocabulary] that may come next by the grammar and the ``listed`` ones.

        Raises:
            GrammarFailed: when there are none.
        """
        allowed = np.ones(vocabulary, np.bool_) if self.grammar is None else self.grammar.allowed(vocabulary)
        if self.sampling.allowed_token_ids:
            listed = np.zeros(vocabulary, np.bool_)
            listed[self.listed] = True
            allowed = allowed & listed
        if self.barred is not None:
            allowed[self.barred] = False
        if not allowed.any():
            raise GrammarFailed("allowed_token_ids and bad_words leave no token that continues the answer")
        return allowed

    def __post_init__(self) -> None:
        seed = self.sampling.seed
        self.noise_seed = secrets.randbits(64) if seed is None else seed % (1 << 64)

    def fail(self, failure: Exception) -> None:
        """Note that tokens from the next one on break the grammar. Those before it may still be on their way."""
        if self.failure is None:
            self.failure, self.sound = failure, self.generated

    def is_broken(self, answer: Sequence[int]) -> bool:
        """True if ``answer`` has tokens that break the grammar."""
        return self.sound is not None and len(answer) > self.sound

    def before_token(self, answer: Sequence[int], unknown: int = 0) -> None:
        """Note that the next token comes behind ``answer``, the tokens so far, and ``unknown`` more."""
        self.generated = len(answer) + unknown
        if self.sampling.is_penalised:
            self.occurrences.read(answer)
        if self.sampling.bad_words:
            barred = self.bad_words.behind(answer)
            self.barred = barred if len(barred) else None
        if self.grammar is not None:
            self.grammar.read(answer)
