"""Tokens of a step, drawn in one batch. Seed and index of a token decide its noise in any company."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from patches import uploaded
from service.engine.request import EngineRequest, TokenLogprobs
from service.engine.sampling.adjustment import adjusted
from service.engine.sampling.truncation import BLOCK, keep_min_p, keep_top_k, keep_top_p

PART = 1 << 22
"""Bytes of the rows that a CPU draws together. Larger ones leave its cache between two operations."""


def sample(logits: torch.Tensor, requests: Sequence[EngineRequest | None]) -> torch.Tensor:
    """Next token ids int64 [n] from ``logits`` float32 [n, vocabulary], row by request.

    Appends log-probabilities to the requests that asked for them. None rows (requests cancelled
    meanwhile) take their most likely token, which is dropped.
    """
    rows = [(row, request) for row, request in enumerate(requests) if request is not None]
    with adjusted(logits, rows):
        tokens = most_likely(logits)
        drawing = [(row, request) for row, request in rows if request.sampling.temperature > 0]
        if drawing:
            chosen = uploaded(torch.tensor([row for row, _ in drawing]), logits.device)
            drawn = logits if len(drawing) == len(logits) else logits[chosen]
            tokens[chosen] = _draw_in_parts(drawn, tokens[chosen], [request for _, request in drawing])
    _append_logprobs(logits, tokens, [(row, request) for row, request in rows if request.sampling.logprobs is not None])
    return tokens


@contextmanager
def undone_on_error(requests: Sequence[EngineRequest | None]) -> Iterator[None]:
    """Inside, an exception takes back the log-probabilities that ``sample`` appended to ``requests``."""
    drawn = [(request, len(request.logprobs)) for request in requests if request is not None]
    try:
        yield
    except Exception:
        for request, length in drawn:
            del request.logprobs[length:]
        raise


def _draw_in_parts(logits: torch.Tensor, greedy: torch.Tensor, requests: Sequence[EngineRequest]) -> torch.Tensor:
    """As ``_draw``, on a CPU by parts of the rows."""
    size = max(1, PART // logits[0].nbytes) if logits.device.type == "cpu" else len(logits)
    parts = [slice(start, start + size) for start in range(0, len(logits), size)]
    return torch.cat([_draw(logits[part], greedy[part], requests[part]) for part in parts])


def _draw(logits: torch.Tensor, greedy: torch.Tensor, requests: Sequence[EngineRequest]) -> torch.Tensor:
    """Temperature, then min-p, top-k, and top-p over what is left, then one draw by the inverse distribution function.

    ``greedy`` int64 [n] are the most likely tokens.
    """
    device, (rows, vocabulary) = logits.device, logits.shape
    params = [request.sampling for request in requests]
    temperature = uploaded(torch.tensor([each.temperature for each in params]), device)
    weights = logits.new_empty(rows, -(-vocabulary // BLOCK) * BLOCK)
    weights[:, vocabulary:] = 0.0
    likely = weights[:, :vocabulary]
    torch.sub(logits, logits.gather(-1, greedy[:, None]), out=likely).div_(temperature[:, None]).exp_()
    min_p = [(row, each.min_p) for row, each in enumerate(params) if each.min_p > 0]
    top_k = [(row, each.top_k) for row, each in enumerate(params) if 0 < each.top_k < vocabulary]
    top_p = [(row, each.top_p) for row, each in enumerate(params) if each.top_p < 1.0]
    for keep, wanted in ((keep_min_p, min_p), (keep_top_k, top_k), (keep_top_p, top_p)):
        if wanted:
            chosen, numbers = zip(*wanted, strict=True)
            _in_rows(likely, chosen, partial(keep, numbers=numbers))
    return _inverse(weights, uploaded(torch.from_numpy(noise(requests)), device), greedy)


def most_likely(logits: torch.Tensor) -> torch.Tensor:
    """Token ids int64 [n]. On a CPU by numpy, which takes a tenth of torch's time."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    return torch.from_numpy(logits.numpy().argmax(-1))


def _in_rows(weights: torch.Tensor, rows: Sequence[int], change: Callable[[torch.Tensor], None]) -> None:
    """Change ``rows`` of ``weights`` in place."""
    if len(rows) == len(weights):
        change(weights)
        return
    at = uploaded(torch.tensor(rows), weights.device)
    chosen = weights[at]
    change(chosen)
    weights[at] = chosen


def noise(requests: Sequence[EngineRequest]) -> np.ndarray:
    """Uniform float64 [n] in [0, 1), a multiple of 2^-52: SplitMix64 (Steele et al., OOPSLA 2014) of the request's
    seed and the index of its token."""
    seeds = np.array([request.noise_seed for request in requests], np.uint64)
    indices = np.array([request.generated + 1 for request in requests], np.uint64)
    bits = _mixed(_mixed(seeds) + indices * np.uint64(0x9E3779B97F4A7C15))
    return (bits >> np.uint64(12)) * 2.0**-52


def _mixed(bits: np.ndarray) -> np.ndarray:
    """uint64 [n] whose bits all depend on all bits."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(bits ^ (bits >> np.uint64(31)))


def _inverse(weights: torch.Tensor, uniform: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    """Index int64 [n] at the share ``uniform`` float64 [n] of each row's sum; ``weights`` [n, a multiple of BLOCK].

    A draw chooses a block, then a token of it.

    A row's sums are over its own blocks, and so are the same in any batch. A row without a sum, since a model has given
    no numbers, has the index of ``otherwise`` [n].
    """
    blocks = weights.unflatten(-1, (-1, BLOCK))
    sums = blocks.sum(-1).double().cumsum(-1)
    point = (uniform * sums[:, -1])[:, None]
    # A share is 1 - 2^-52 at most, so the product is below the last sum, and a block is left.
    block = (sums <= point).sum(-1, keepdim=True)
    inside = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0].double().cumsum(-1)
    before = sums.gather(-1, block) - inside[:, -1:]
    # Rounded sums must not lead to tokens of the block before the first or behind the last with any weight.
    point = torch.minimum((point - before).clamp_min(0.0), inside[:, -1:].nextafter(torch.zeros_like(point)))
    token: torch.Tensor = block * BLOCK + (inside <= point).sum(-1, keepdim=True)
    return torch.where(sums[:, -1].isfinite(), token[:, 0], otherwise)


def _append_logprobs(logits: torch.Tensor, tokens: torch.Tensor, wanted: Sequence[tuple[int, EngineRequest]]) -> None:
    """Log-probabilities of the model itself, before biases, penalties, temperature and truncation."""
    if not wanted:
        return
    rows = uploaded(torch.tensor([row for row, _ in wanted]), logits.device)
    logprobs = logits[rows].log_softmax(dim=-1)
    own = logprobs.gather(-1, tokens[rows][:, None])[:, 0].tolist()
    most = min(max(request.sampling.logprobs or 0 for _, request in wanted), logprobs.shape[-1])
    values, ids = (top.tolist() for top in logprobs.topk(most))
    for (_, request), logprob, row_ids, row_values in zip(wanted, own, ids, values, strict=True):
        count = request.sampling.logprobs or 0
        top = tuple(zip(row_ids[:count], row_values[:count], strict=True))
        request.logprobs.append(TokenLogprobs(logprob, top))
