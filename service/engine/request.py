"""One generation as the engine sees it: tokens, a slot, how to sample. No text and no HTTP."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from service.engine.occurrences import Occurrences

_numbers = itertools.count()


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one generation. Temperature 0 is greedy; ``logprobs`` counts alternatives per token.

    Neither end-of-text tokens nor ``stop_token_ids`` are drawn among the first ``min_tokens``; with ``ignore_eos``
    the former end nothing. ``min_p`` keeps tokens with this share of the largest probability, at least.
    ``logit_bias`` are (token, what its logit gains). ``repetition_penalty`` divides positive logits of all tokens so
    far, and multiplies negative ones. The other penalties count the tokens of the answer.
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

    def ends_at(self, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Tokens that end a generation of a model with these end-of-text tokens."""
        return self.stop_token_ids if self.ignore_eos else eos_token_ids + self.stop_token_ids

    @property
    def is_penalised(self) -> bool:
        """True if a token's logit depends on the tokens before it."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability of one generated token and of the ``top`` most likely ones, as (id, logprob)."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(eq=False)
class EngineRequest:
    """State shared between the event loop, which creates it, and the generation thread, which samples.

    ``slot`` is in use from admission to the end. ``cache_key`` separates the prefix cache: requests share blocks only
    where it is equal. ``on_prefill`` is called on the generation thread with the prompt tokens done, after every chunk
    but the last. ``cached_tokens`` of the prompt were found in the prefix cache; ``failure`` is why this request failed
    alone; ``tenant`` sent it. ``sink_window`` counts the first and the last keys that its queries reach, None for all.
    Pages of the other keys are given back. ``eos_token_ids`` are the model's end-of-text tokens. ``generated`` counts
    the tokens before the one that is drawn; with ``noise_seed``, 64 bits, it decides the noise of that token.
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

    @property
    def ends_at(self) -> tuple[int, ...]:
        """Tokens that end this generation."""
        return self.sampling.ends_at(self.eos_token_ids)

    @property
    def is_held_back(self) -> bool:
        """True if the next token may not be one of ``enders``."""
        return self.generated < self.sampling.min_tokens and len(self.enders) > 0

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

    def __post_init__(self) -> None:
        seed = self.sampling.seed
        self.noise_seed = secrets.randbits(64) if seed is None else seed % (1 << 64)

    def before_token(self, answer: Sequence[int], unknown: int = 0) -> None:
        """Note that the next token comes behind ``answer``, the tokens so far, and ``unknown`` more."""
        self.generated = len(answer) + unknown
        if self.sampling.is_penalised:
            self.occurrences.read(answer)
