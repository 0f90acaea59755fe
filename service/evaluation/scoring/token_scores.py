"""Token ids and an encoding in, one log-probability per token out. Everything else is arithmetic.

Prefill runs in chunks through a cache and never holds logits of more than one chunk. A chunk's targets
reach one token past its inputs, so the prediction across each boundary is scored too. ``Reading`` also decodes
greedily from the same cache.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from patches import Patched, ResolvedRecipe, encode
from service.engine.padded.caches import joined, sizes
from service.engine.padded.forward import keeps_logits
from service.engine.padded.room import make_room
from service.evaluation.scoring.chunks import bounded, chunk_length, in_parts

Nll = np.ndarray


class NotANumber(ArithmeticError):
    """The model's logits are NaN, as when float16 overflows under an untrained encoding."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"the model gives no numbers any more after {tokens} tokens or a few more: try another dtype")


@dataclass
class TokenScores:
    """Scores of tokens 1 .. n-1 of a prompt, and of ``next_id`` after them on request.

    ``token_ids`` int64 and ``logprobs`` float64 [m] in nats; ``ranks`` int64 [m], 1 is the most likely token;
    the most likely alternatives as ``top_ids`` int64 and ``top_logprobs`` float64 [m, k]. Ranks stay 0 without
    a request for alternatives.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    next_id: int | None = None

    @classmethod
    def empty(cls, tokens: int, top: int) -> TokenScores:
        ids, ranks, top_ids = (np.zeros(shape, np.int64) for shape in (tokens, tokens, (tokens, top)))
        return cls(ids, np.zeros(tokens), ranks, top_ids, np.zeros((tokens, top)))

    def put(
        self, start: int, targets: torch.Tensor, logits: torch.Tensor, *, with_ranks: bool, normalized: bool = False
    ) -> None:
        """Take ``targets`` int64 [n] under ``logits`` [n, vocabulary], the first of them at ``start``.

        ``normalized`` ones are log-probabilities. A card computes every part before its numbers are asked for.
        """
        own, ids, values, ranks = [], [], [], []
        for part, numbers in in_parts(logits):
            logprobs = numbers if normalized else numbers.log_softmax(dim=-1)
            own.append(logprobs.gather(-1, targets[part, None]))
            if top := self.top_ids.shape[1]:
                best = logprobs.topk(top)
                ids.append(best.indices)
                values.append(best.values)
            if with_ranks:
                ranks.append((logprobs > own[-1]).sum(-1).add(1))
        rows = slice(start, start + len(targets))
        self.logprobs[rows] = _on_host(own)[:, 0]
        if np.isnan(self.logprobs[rows]).any():
            raise NotANumber(start)
        self.token_ids[rows] = targets.cpu().numpy()
        if ids:
            self.top_ids[rows], self.top_logprobs[rows] = _on_host(ids), _on_host(values)
        if ranks:
            self.ranks[rows] = _on_host(ranks)


def _on_host(parts: list[torch.Tensor]) -> np.ndarray:
    return torch.cat(parts).cpu().numpy()


@dataclass
class Reading:
    """A sequence as a model reads it under one encoding: its cache, and how many tokens are in it.

    The cache has room for ``tokens``, as many as are known to come; more still fit.

    For a model that returns no cache, ``cache`` has the tokens, int64 [length], and each forward reads all of them.
    """

    patch: Patched
    slot: int
    tokens: int = 0
    length: int = 0
    cache: Any = None

    def logits(self, ids: torch.Tensor, *, evict: bool = True) -> torch.Tensor:
        """[n, vocabulary] after each of the next tokens, int64 [n], in the dtype of the model. Without ``evict``
        nothing leaves the cache, so that the tokens can be forgotten again."""
        if not self.patch.returns_cache:
            return self._logits_without_cache(ids)
        positions = torch.arange(self.length, self.length + len(ids), device=ids.device)
        with torch.no_grad():
            output = self.patch.model(
                input_ids=ids[None],
                position_ids=encode(positions, self.slot)[None],
                cache=self.cache,
                use_cache=True,
            )
        if self.cache is None and self.patch.sink_window(self.patch.slots[self.slot]) is None:
            self.patch.ranks.apply(make_room, output.cache, self.tokens)
        self.cache = output.cache
        self.length += len(ids)
        if evict:
            self.patch.evict(self.cache, self.slot)
        logits: torch.Tensor = output.logits[0]
        return logits

    def _logits_without_cache(self, ids: torch.Tensor) -> torch.Tensor:
        self.cache = ids if self.cache is None else torch.cat((self.cache, ids))
        self.length = len(self.cache)
        positions = encode(torch.arange(self.length, device=ids.device), self.slot)
        last = {"logits_to_keep": len(ids)} if keeps_logits(self.patch.model) else {}
        with torch.no_grad():
            output = self.patch.model(input_ids=self.cache[None], position_ids=positions[None], use_cache=False, **last)
        logits: torch.Tensor = output.logits[0, -len(ids) :]
        return logits

    def prefill(self, token_ids: Sequence[int], chunk: int | None) -> Generator[int, None, torch.Tensor]:
        """Read a prompt in chunks; log-probabilities float32 [vocabulary] of what follows it."""
        device = self.patch.model.device
        chunk = chunk_length(chunk, self.patch)
        ids = torch.tensor(token_ids, device=device)
        last = ids.new_empty(0, dtype=torch.float32)
        while self.length < len(ids):
            stop = min(self.length + bounded(self.patch, chunk, self.length), len(ids))
            read = stop - self.length
            last = self.logits(ids[self.length : stop])[-1].float().log_softmax(dim=-1)
            yield read
        return last

    def answer(
        self, last: torch.Tensor, answer_ids: Sequence[int], chunk: int | None
    ) -> Generator[int, None, TokenScores]:
        """Scores and ranks of ``answer_ids`` [m >= 1] where ``last`` [vocabulary] says what comes next; then the
        sequence is what it was before."""
        ids = torch.tensor(answer_ids, device=last.device)
        scores = TokenScores.empty(len(ids), 0)
        scores.put(0, ids[:1], last[None], with_ranks=True, normalized=True)
        before, inputs = self.cache, len(ids) - 1
        cached = self.patch.returns_cache
        has_states = not cached or bool(sizes(before)[1])  # recurrent states cannot be cut, so a copy reads the answer
        if has_states:
            self.cache = self.patch.ranks.apply(joined, [before]) if cached else before
        else:
            self.patch.ranks.apply(_record_past, self.cache)
        chunk = chunk_length(chunk, self.patch) if self.patch.continues or not cached else 1
        for start in range(0, inputs, chunk):
            stop = min(start + chunk, inputs)
            logits = self.logits(ids[start:stop], evict=False)
            scores.put(start + 1, ids[start + 1 : stop + 1], logits, with_ranks=True)
            yield stop - start
        if has_states:
            self.cache = before
        elif inputs:
            self.patch.ranks.apply(_crop, self.cache, inputs)
        self.length -= inputs
        return scores

    def decode(
        self, last: torch.Tensor, new_tokens: int, eos_token_ids: Sequence[int]
    ) -> Generator[int, None, np.ndarray]:
        """The greedy continuation, int64 [1 <= n <= new_tokens], an end token included; yields 1 per token read."""
        found = [int(last.argmax())]
        while len(found) < new_tokens and found[-1] not in eos_token_ids:
            last = self.logits(torch.tensor(found[-1:], device=last.device))[-1]
            found.append(int(last.argmax()))
            yield 1
        return np.array(found, np.int64)


def _record_past(cache: Any) -> None:
    """Layers that slide keep what they need to go back."""
    cache.activate_past_recording()


def _crop(cache: Any, tokens: int) -> None:
    """Forget the last ``tokens``."""
    cache.crop(-tokens)


def token_scores(
    patch: Patched,
    token_ids: Sequence[int],
    slot: int,
    chunk: int | None,
    *,
    top: int | None = None,
    with_next: bool = False,
) -> Generator[int, None, TokenScores]:
    """Scores of tokens 1 .. n-1 of ``token_ids``; yields tokens per chunk done.

    ``top`` alternatives per token are kept, and the tokens' ranks; None keeps neither. ``with_next`` adds the most
    likely token after the last one, as ``next_id`` and as a last row.
    A generator because the caller runs it between generation steps, one chunk at a time.
    """
    device = patch.model.device
    vocab_size = patch.num_logits
    chunk = chunk_length(chunk, patch)
    # Without a next token the last one is only a target and needs no forward.
    inputs = len(token_ids) - (0 if with_next else 1)
    scores = TokenScores.empty(inputs, min(top or 0, vocab_size))
    ids = torch.tensor(token_ids, device=device)
    reading = Reading(patch, slot, inputs)
    while (start := reading.length) < inputs:
        stop = min(start + bounded(patch, chunk, start), inputs)
        logits = reading.logits(ids[start:stop])
        targets = ids[start + 1 : stop + 1]
        if len(targets) < stop - start:
            targets = torch.cat((targets, logits[-1].argmax()[None]))
            scores.next_id = int(targets[-1])
        scores.put(start, targets, logits, with_ranks=top is not None)
        del logits
        yield stop - start
    return scores


def token_nll(patch: Patched, token_ids: Sequence[int], slot: int, chunk: int | None) -> Generator[int, None, Nll]:
    """NLL in nats of tokens 1 .. n-1 of ``token_ids``, float64 [n - 1]; yields tokens per chunk done."""
    return -(yield from token_scores(patch, token_ids, slot, chunk)).logprobs


def prompt_scores(
    patch: Patched, resolved: ResolvedRecipe, token_ids: Sequence[int], chunk: int | None, *, top: int, with_next: bool
) -> Generator[int, None, TokenScores]:
    """Scores of a prompt under one encoding, in a slot for that time.

    Raises:
        SlotsExhausted: when every slot is taken.
    """
    with patch.slots.held(resolved) as slot:
        return (yield from token_scores(patch, token_ids, slot, chunk, top=top, with_next=with_next))
