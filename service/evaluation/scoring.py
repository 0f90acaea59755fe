"""Token ids and an encoding in, one log-probability per token out. Everything else is arithmetic.

Prefill runs in chunks through a cache and never holds logits of more than one chunk. A chunk's targets
reach one token past its inputs, so the prediction across each boundary is scored too.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from patches import Patched, ResolvedRecipe, encode

Nll = np.ndarray
LOGITS_BYTES = 64 << 20
"""Most bytes of one chunk's float32 logits: with a large vocabulary, chunks get shorter."""


@dataclass
class TokenScores:
    """What the model said of tokens 1 .. n-1 of a prompt, and of ``next_id`` after them where it was asked for.

    ``token_ids`` int64 and ``logprobs`` float64 [m] in nats; ``ranks`` int64 [m], 1 is the most likely token;
    the most likely alternatives as ``top_ids`` int64 and ``top_logprobs`` float64 [m, k]. Ranks stay 0 where
    nobody asked for alternatives.
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

    def put(self, start: int, targets: torch.Tensor, logprobs: torch.Tensor, *, with_ranks: bool) -> None:
        """Take ``targets`` int64 [n] under ``logprobs`` float32 [n, vocabulary], the first of them at ``start``."""
        rows = slice(start, start + len(targets))
        own = logprobs.gather(-1, targets[:, None])
        self.token_ids[rows] = targets.cpu().numpy()
        self.logprobs[rows] = own[:, 0].double().cpu().numpy()
        if top := self.top_ids.shape[1]:
            values, ids = logprobs.topk(top)
            self.top_ids[rows], self.top_logprobs[rows] = ids.cpu().numpy(), values.double().cpu().numpy()
        if with_ranks:
            self.ranks[rows] = (logprobs > own).sum(-1).add(1).cpu().numpy()


def chunk_length(wanted: int, vocab_size: int) -> int:
    """Tokens per chunk, at most ``wanted``."""
    return max(16, min(wanted, LOGITS_BYTES // (4 * vocab_size)))


FULL_CHUNK_CONTEXT = 512
"""Tokens before a chunk up to which it has its full length."""


def bounded(chunk: int, context: int, device: torch.device) -> int:
    """Tokens of a chunk after ``context`` others: the pairs that it attends to stay bounded, since a request that
    comes meanwhile waits for all of it. Chunks depend on nothing else, and so do their rounding errors.

    An accelerator takes a full chunk at any context in milliseconds, and small ones would starve it.
    """
    if device.type != "cpu":
        return chunk
    return max(min(16, chunk), min(chunk, chunk * (FULL_CHUNK_CONTEXT + chunk) // (context + chunk)))


def token_scores(
    patch: Patched, token_ids: Sequence[int], slot: int, chunk: int, *, top: int | None = None, with_next: bool = False
) -> Generator[int, None, TokenScores]:
    """Scores of tokens 1 .. n-1 of ``token_ids``; yields tokens per chunk done.

    ``top`` alternatives per token are kept, and the tokens' ranks; None keeps neither. ``with_next`` adds the most
    likely token after the last one, as ``next_id`` and as a last row.
    A generator because the caller runs it between generation steps, one chunk at a time.
    """
    model, device = patch.model, patch.model.device
    vocab_size = model.config.get_text_config().vocab_size
    chunk = chunk_length(chunk, vocab_size)
    # Without a next token the last one is only ever a target: it needs no forward of its own.
    inputs = len(token_ids) - (0 if with_next else 1)
    scores = TokenScores.empty(inputs, min(top or 0, vocab_size))
    ids = torch.tensor(token_ids, device=device)
    cache = None
    start = stop = 0
    while (start := stop) < inputs:
        stop = min(start + bounded(chunk, start, device), inputs)
        position_ids = encode(torch.arange(start, stop, device=device), slot)[None]
        with torch.no_grad():
            output = model(
                input_ids=ids[None, start:stop], position_ids=position_ids, past_key_values=cache, use_cache=True
            )
            logprobs = output.logits[0].float().log_softmax(dim=-1)
        targets = ids[start + 1 : stop + 1]
        if len(targets) < stop - start:
            targets = torch.cat((targets, logprobs[-1].argmax()[None]))
            scores.next_id = int(targets[-1])
        scores.put(start, targets, logprobs, with_ranks=top is not None)
        cache = output.past_key_values
        patch.evict(cache, slot)
        del output, logprobs
        yield stop - start
    return scores


def token_nll(patch: Patched, token_ids: Sequence[int], slot: int, chunk: int) -> Generator[int, None, Nll]:
    """NLL in nats of tokens 1 .. n-1 of ``token_ids``, float64 [n - 1]; yields tokens per chunk done."""
    return -(yield from token_scores(patch, token_ids, slot, chunk)).logprobs


def prompt_scores(
    patch: Patched, resolved: ResolvedRecipe, token_ids: Sequence[int], chunk: int, *, top: int, with_next: bool
) -> Generator[int, None, TokenScores]:
    """Scores of a prompt under one encoding, whose slot is held meanwhile.

    Raises:
        SlotsExhausted: when every slot is taken.
    """
    slot = patch.slots.acquire(resolved)
    try:
        return (yield from token_scores(patch, token_ids, slot, chunk, top=top, with_next=with_next))
    finally:
        patch.slots.release(slot)
