"""Logits that requests change before a token is chosen: biases, penalties of repetition, tokens held back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from patches import uploaded
from service.engine.request import EngineRequest

Rows = Sequence[tuple[int, EngineRequest]]


def adjusted(logits: torch.Tensor, rows: Rows) -> torch.Tensor:
    """``logits`` float32 [n, vocabulary] with all that the requests of ``rows`` change, in the order of vLLM.

    A new tensor, or ``logits`` itself where nothing changes.
    """
    biased = [(row, *bias) for row, request in rows for bias in request.sampling.logit_bias]
    if biased:
        at, (values,) = _uploaded(biased, 1, logits)
        logits = logits.index_put(at, values, accumulate=True)
    penalised = [(row, request) for row, request in rows if request.sampling.is_penalised and request.occurrences]
    if penalised:
        logits = _penalised(logits, penalised)
    suppressed = [(row, token) for row, request in rows for token in request.suppressed]
    if suppressed:
        at, _ = _uploaded(suppressed, 0, logits)
        logits = logits.index_put(at, logits.new_full((), float("-inf")))
    return logits


def _penalised(logits: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Repetition (Keskar et al., arXiv:1909.05858, section 4.1), then frequency and presence as OpenAI defines them."""
    columns = []
    for row, request in rows:
        params, tokens = request.sampling, len(request.occurrences)
        counts = np.fromiter(request.occurrences.values(), np.float64, tokens)
        column = np.empty((4, tokens))
        column[0], column[1] = row, np.fromiter(request.occurrences, np.float64, tokens)
        column[2] = params.repetition_penalty
        column[3] = params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        columns.append(column)
    at, (factor, loss) = _uploaded(np.concatenate(columns, axis=1).T, 2, logits)
    values = logits[at]
    return logits.index_put(at, torch.where(values > 0, values / factor, values * factor) - loss)


def _uploaded(
    entries: Sequence[tuple[float, ...]] | np.ndarray, numbers: int, logits: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]:
    """((rows, tokens), ``numbers`` columns in the type of ``logits``) of ``entries`` [m, 2 + numbers], in one copy.

    Row numbers and token ids are exact in float64.
    """
    table = uploaded(torch.tensor(entries, dtype=torch.float64), logits.device).T
    where = table[:2].long()
    return (where[0], where[1]), tuple(table[2 : 2 + numbers].to(logits.dtype))
