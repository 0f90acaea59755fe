"""Logits that requests change before a token is chosen: by what is allowed, biases, penalties, tokens held back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from patches import uploaded
from service.engine.request import EngineRequest, GrammarFailed, SamplingParams

Rows = Sequence[tuple[int, EngineRequest]]
Places = tuple[torch.Tensor, ...]


@contextmanager
def adjusted(logits: torch.Tensor, rows: Rows) -> Iterator[None]:
    """Inside, ``logits`` float32 [n, vocabulary] have all that the requests of ``rows`` change, in the order of vLLM.

    They are changed in place and restored: a copy of 64 rows takes longer than to find their most likely tokens. Rows
    with a mask are restored only for log-probabilities. A request whose grammar fails has it as ``failure``, and an
    unchanged row.
    """
    changed: list[tuple[Places, torch.Tensor]] = []

    def change(at: Places, values: torch.Tensor) -> None:
        changed.append((at, logits[at]))
        logits.index_put_(at, values)

    try:
        for row, request, forbidden in _masked(rows, logits):
            if request.sampling.logprobs is not None:
                changed.append(((logits.new_tensor(row, dtype=torch.long),), logits[row].clone()))
            logits[row].masked_fill_(forbidden, float("-inf"))
        if biased := [(row, request) for row, request in rows if request.sampling.logit_bias]:
            at = _places([(row, request.biases[0]) for row, request in biased], logits)
            change(at, logits[at] + _numbers([request.biases[1] for _, request in biased], logits))
        if penalised := [(row, one) for row, one in rows if one.sampling.is_penalised]:
            found = [(row, one.sampling, *one.occurrences.below(logits.shape[-1])) for row, one in penalised]
            at = _places([(row, tokens) for row, _, tokens, _ in found], logits)
            change(at, _penalised(logits[at], [(params, counts) for _, params, _, counts in found]))
        if held_back := [(row, request.held_back) for row, request in rows if request.is_held_back]:
            change(_places(held_back, logits), logits.new_full((), float("-inf")))
        yield
    finally:
        for at, values in reversed(changed):
            logits.index_put_(at, values)


def _masked(rows: Rows, logits: torch.Tensor) -> Iterator[tuple[int, EngineRequest, torch.Tensor]]:
    """The rows with a grammar or a list of tokens, each with the tokens bool [vocabulary] that may not come."""
    for row, request in rows:
        if request.sampling.is_masked:
            try:
                forbidden = ~request.allowed(logits.shape[-1])
            except GrammarFailed as failure:
                request.fail(failure)
            else:
                yield row, request, uploaded(torch.from_numpy(forbidden), logits.device)


def _penalised(values: torch.Tensor, found: Sequence[tuple[SamplingParams, np.ndarray]]) -> torch.Tensor:
    """``values`` [m] of the tokens that occur as often as ``found`` has, after the penalties of their requests.

    Repetition (Keskar et al., arXiv:1909.05858, section 4.1), then frequency and presence as OpenAI defines them.
    """
    factors, losses = [], []
    for params, counts in found:
        factors.append(np.full(len(counts), params.repetition_penalty))
        losses.append(params.frequency_penalty * counts + params.presence_penalty * (counts > 0))
    factor, loss = _numbers(factors, values), _numbers(losses, values)
    return torch.where(values > 0, values / factor, values * factor) - loss


def _places(tokens: Sequence[tuple[int, np.ndarray]], logits: torch.Tensor) -> Places:
    """(rows, tokens), int64 [m] each, of the ``tokens`` of some rows."""
    rows = np.concatenate([np.full(len(own), row) for row, own in tokens])
    places = np.stack((rows, np.concatenate([own for _, own in tokens])))
    where = uploaded(torch.from_numpy(places), logits.device)
    return where[0], where[1]


def _numbers(parts: Sequence[np.ndarray], logits: torch.Tensor) -> torch.Tensor:
    """``parts`` joined, in the type of ``logits``."""
    return uploaded(torch.from_numpy(np.concatenate(parts)).to(logits.dtype), logits.device)
