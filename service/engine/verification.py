"""A comparison of the paged engine with the model's plain forward, before anything is served.

A model can pass every check of its forward and still be wrong from pages. Its attention may run twice in a layer, its
values may have another width, or it has a state beside keys and values. A few tokens show it.
"""

from __future__ import annotations

import torch

from patches import Method, Patched, UnsupportedModel, encode, one_per_route
from service.engine.adapter import EncodingManager
from service.engine.request import EngineRequest, SamplingParams
from service.sharing.heap import frozen

PROMPT, NEW = 20, 4
"""Tokens. Steps of 16 cut every prompt, and pages of 4 are given back where an encoding forgets."""

TOP = 8
"""Most likely tokens whose log-probabilities are compared, at every new token."""

TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
"""Largest difference, in distances from the median logit to the largest. On the tiny models of the tests rounding makes
at most 4e-7, 2e-6, 3e-3 and 2e-2, and a value without its last number 0.07 and more."""


def verify(patch: Patched) -> None:
    """Generate a few tokens from pages, under the model's own encoding and one per route, and compare.

    Raises:
        UnsupportedModel: naming the encoding under which the engine fails or differs.
    """
    length = min(PROMPT + NEW, patch.geometry.table_rows or PROMPT + NEW)
    vocab_size = int(patch.model.config.get_text_config().vocab_size)
    prompt = torch.linspace(1, vocab_size - 1, length - NEW).long().tolist()
    try:
        with frozen():  # transformers collects garbage when a batch is over
            methods = one_per_route(patch.geometry, length)
            requests = [_request(patch, method, prompt) for method in methods]
            for method, request, token_ids in zip(methods, requests, _from_pages(patch, requests), strict=True):
                _compare(patch, method, request, token_ids)
    finally:
        patch.forget_encodings()


def _request(patch: Patched, method: Method, prompt: list[int]) -> EngineRequest:
    resolved = patch.resolve(method, len(prompt) + NEW)
    slot, sampling = patch.slots.acquire(resolved), SamplingParams(logprobs=TOP)
    return EngineRequest(prompt, slot, (None, None, resolved), NEW, sampling, sink_window=patch.sink_window(resolved))


def _from_pages(patch: Patched, requests: list[EngineRequest]) -> list[list[int]]:
    try:
        manager = EncodingManager(
            patch,
            cache_tokens=512,
            page_size=4,
            max_batch_tokens=16,
            max_requests_per_batch=len(requests),
            prefix_sharing=True,
        )
        return manager.run_to_end(requests)
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel(f"the paged engine fails on it: {error}") from error


@torch.no_grad()
def _compare(patch: Patched, method: Method, request: EngineRequest, token_ids: list[int]) -> None:
    """Against one plain forward over the prompt and the tokens that the engine chose."""
    tokens = torch.tensor([request.prompt_ids + token_ids[:-1]], device=patch.model.device)
    position_ids = encode(torch.arange(tokens.shape[1], device=tokens.device)[None], request.slot)
    logits = patch.model(input_ids=tokens, position_ids=position_ids, use_cache=False).logits[0, -NEW:].double()
    expected, spread = logits.log_softmax(-1), logits.amax(-1) - logits.median(-1).values
    for step, found in enumerate(request.logprobs):
        ids, values = zip((token_ids[step], found.logprob), *found.top, strict=True)
        difference = float((expected[step, list(ids)].cpu() - torch.tensor(values).double()).abs().max())
        if not difference <= TOLERANCE[patch.model.dtype] * float(spread[step]):  # neither is NaN
            raise UnsupportedModel(
                f"the paged engine does not compute what its own forward computes under {method.method}: at token "
                f"{len(request.prompt_ids) + step} log-probabilities differ by {difference:.2g}, where the "
                f"largest logit is {float(spread[step]):.2g} above the median and rounding makes "
                f"{TOLERANCE[patch.model.dtype]:g} of that at most"
            )
