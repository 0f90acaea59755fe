"""Drawing tokens: each request from its own noise, so that neighbours never change a result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from service.engine.request import EngineRequest, TokenLogprobs


def sample(logits: torch.Tensor, requests: Sequence[EngineRequest | None]) -> torch.Tensor:
    """Next token ids int64 [n] from ``logits`` float32 [n, vocabulary], row by request.

    Appends log-probabilities to the requests that asked for them. None rows (requests cancelled
    meanwhile) take their most likely token, which is dropped.
    """
    tokens = logits.argmax(dim=-1)
    for row, request in enumerate(requests):
        if request is None:
            continue
        allowed = logits[row]
        if request.suppressed:
            allowed = allowed.index_fill(0, torch.tensor(request.suppressed, device=logits.device), float("-inf"))
            tokens[row] = allowed.argmax()
        if request.generator is not None:
            tokens[row] = _draw(allowed, request)
        if request.sampling.logprobs is not None:
            request.logprobs.append(_logprobs(logits[row], int(tokens[row]), request.sampling.logprobs))
    return tokens


@contextmanager
def undone_on_error(requests: Sequence[EngineRequest | None]) -> Iterator[None]:
    """Inside, an exception takes back the noise and the log-probabilities that ``sample`` drew for ``requests``."""
    live = [request for request in requests if request is not None]
    noise = [None if request.generator is None else request.generator.get_state() for request in live]
    drawn = [len(request.logprobs) for request in live]
    try:
        yield
    except Exception:
        for request, state, length in zip(live, noise, drawn, strict=True):
            del request.logprobs[length:]
            if request.generator is not None and state is not None:
                request.generator.set_state(state)
        raise


def _draw(logits: torch.Tensor, request: EngineRequest) -> torch.Tensor:
    """Temperature, then top-k, then top-p over what is left, then one draw by the Gumbel-max trick.

    The noise comes from the request's own CPU generator: one vector per token, whatever the device.
    """
    params, generator = request.sampling, request.generator
    noise = torch.empty(logits.shape[-1], dtype=torch.float64).exponential_(generator=generator)
    scaled = logits.double() / params.temperature
    ordered, order = scaled.sort(descending=True)
    if 0 < params.top_k < ordered.shape[0]:
        ordered[params.top_k :] = float("-inf")
    if params.top_p < 1.0:
        probs = ordered.softmax(dim=-1)
        ordered[probs.cumsum(dim=-1) - probs >= params.top_p] = float("-inf")
    gumbel = -noise.clamp_min(torch.finfo(torch.float64).tiny).log().to(ordered.device)
    return order[(ordered + gumbel[order]).argmax()]


def _logprobs(logits: torch.Tensor, token: int, count: int) -> TokenLogprobs:
    """Log-probabilities of the model itself, before temperature, truncation and tokens held back."""
    logprobs = logits.log_softmax(dim=-1)
    top: tuple[tuple[int, float], ...] = ()
    if count:
        values, ids = logprobs.topk(min(count, logprobs.shape[-1]))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(float(logprobs[token]), top)
