"""The choice of a model's engine: each is compared with the model's own forwards, before anything is served.

A model can pass every check of its forward and still be wrong from pages. Its attention may run twice in a layer, or
its values may have another width. Or it has a state beside keys and values. A few tokens show it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from patches import Method, Patched, UnsupportedModel, allowed_rounding, encode, one_per_route
from service.engine.adapter import EncodingManager
from service.engine.adapter.compatibility import IncompatibleTransformers
from service.engine.adapter.configuration import is_divided
from service.engine.choice import Attention, EngineChoice, choices
from service.engine.limits import EngineLimits
from service.engine.request import EngineRequest, SamplingParams
from service.machine.heap import frozen

PROMPT, NEW, PAGE = 20, 4, 4
"""Tokens. Pages of 4 are given back where an encoding forgets."""

STEP = PROMPT * 4 // 5
"""Tokens of a step over prompts of ``PROMPT`` tokens, and as large a share of longer ones. It cuts them, and a row
still decodes when the next one begins to. Smaller steps would join no rows."""

BEHIND, LONGEST = 12, 280
"""Tokens of a prompt behind the smallest window of the model, which moves on by pages there. ``LONGEST`` is the most
tokens of such a prompt."""

TOP = 8
"""Most likely tokens whose log-probabilities are compared, at every new token."""

DRIFT = 0.02
"""Largest difference between the plain forward and single tokens from a cache: 1e-3 in a tiny Zamba 2."""


def verify(
    patch: Patched, attention: Attention = "segments", page_size: int = PAGE, graphs: bool | None = None
) -> EngineChoice:
    """The first engine that computes what the model computes: a few tokens under its own encoding and one per route.

    Engines with ``attention`` come first. A kernel is also compiled and checked for pages of ``page_size``. Without an
    engine, the choice is none, and its reason names the encoding under which each engine fails or differs.

    Raises:
        UnsupportedModel: when the model's own forward gives no numbers.
        AttentionUnavailable, GraphsUnavailable: when the machine cannot run ``attention``, or ``graphs`` with it.
    """
    prompt = torch.linspace(1, patch.num_logits - 1, checked_length(patch) - NEW).long().tolist()
    reasons: dict[EngineChoice, str] = {}
    for choice in choices(attention, patch.model.device, graphs):
        if choice.recorded and is_divided(patch.model):
            continue  # sums over ranks are no functions of torch, which lists consist of
        try:
            _check(patch, choice, prompt, page_size)
        except IncompatibleTransformers:
            raise
        except UnsupportedModel as error:
            reasons[choice.slower] = str(error)  # without graphs or lists, one engine may fail in the same way
        else:
            return replace(choice, reason="; ".join(reasons.values()) or None)
    reason = "; ".join(reasons.values())
    if bool(_logits(patch, prompt).isnan().any()):
        raise UnsupportedModel(reason)
    return EngineChoice("none", reason=reason)


def checked_length(patch: Patched) -> int:
    """Tokens of a sequence of the check.

    They are more than the smallest window of the model has, unless that is too large.
    """
    window = patch.smallest_window
    prompt = PROMPT if window is None or window + BEHIND > LONGEST else max(PROMPT, window + BEHIND)
    return min(prompt + NEW, patch.geometry.table_rows or prompt + NEW)


def _rounding(patch: Patched, prompt: list[int]) -> float:
    """Largest difference that rounding makes, in distances from the median logit to the largest."""

    def difference(found: torch.Tensor, plain: torch.Tensor) -> float:
        spread = plain.amax(-1) - plain.median(-1).values
        return float(((found - plain).abs().amax(-1) / spread).nan_to_num(0.0).max())

    return allowed_rounding(patch.model, lambda: _logits(patch, prompt), difference)


@torch.no_grad()
def _logits(patch: Patched, tokens: list[int]) -> torch.Tensor:
    """float64 [tokens, vocabulary] under the model's own encoding, without a cache."""
    output = patch.model(input_ids=torch.tensor([tokens], device=patch.model.device), use_cache=False)
    logits: torch.Tensor = output.logits[0].double()
    return logits


def _check(patch: Patched, choice: EngineChoice, prompt: list[int], page_size: int = PAGE) -> None:
    """Raises:
    UnsupportedModel: when the engine fails or differs.
    """
    methods, rounding = one_per_route(patch.geometry, len(prompt) + NEW), _rounding(patch, prompt)
    # A kernel is compiled for a size of pages and for the kinds of encodings in a step. It compiles here, and in no
    # served step.
    alone = [([method], page_size) for method in methods] if choice.attention == "triton" else []
    if choice.recorded:  # alone, several steps have as many rows, and run from one list
        alone = [(methods[:1], PAGE)]
    try:
        with frozen():  # transformers collects garbage when a batch is over
            for together, size in [(methods, PAGE), *alone]:
                # Pages share prefixes, so equal prompts show encodings that cross. Padding needs unequal lengths.
                shorter = 3 if choice.kind == "padded" else 1
                requests = [_request(patch, each, prompt[number % shorter :]) for number, each in enumerate(together)]
                generated = _generated(patch, choice, requests, size)
                for method, request, token_ids in zip(together, requests, generated, strict=True):
                    _compare(patch, choice, method, request, token_ids, rounding)
    finally:
        patch.forget_encodings()


def _request(patch: Patched, method: Method, prompt: list[int]) -> EngineRequest:
    resolved = patch.resolve(method, len(prompt) + NEW)
    slot, sampling = patch.slots.acquire(resolved), SamplingParams(logprobs=TOP)
    return EngineRequest(prompt, slot, (None, None, resolved), NEW, sampling, sink_window=patch.sink_window(resolved))


def _generated(patch: Patched, choice: EngineChoice, requests: list[EngineRequest], page_size: int) -> list[list[int]]:
    longest = max(len(request.prompt_ids) for request in requests)
    limits = EngineLimits(
        cache_tokens=max(512, 2 * len(requests) * longest),
        score_tokens=0,
        page_size=page_size,
        max_batch_tokens=max(STEP, longest * STEP // PROMPT),
        max_requests_per_batch=len(requests),
    )
    try:
        engine = choice.built(patch, limits)
        token_ids = engine.run_to_end(requests)
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel(f"the {choice} fails on it: {error}") from error
    if isinstance(engine, EncodingManager) and engine.failures:
        how = "capture" if choice.graphs else "record"
        raise UnsupportedModel(f"the {choice} cannot {how} its decode steps: {engine.failures[0]}")
    return token_ids


def _compare(
    patch: Patched,
    choice: EngineChoice,
    method: Method,
    request: EngineRequest,
    token_ids: list[int],
    rounding: float,
) -> None:
    """Against forwards over the prompt and the tokens that the engine chose.

    Some recurrent layers compute a single token by another formula than several. The padded engine has to agree with
    the former, and the former roughly with the plain forward.
    """
    if choice.kind == "padded":
        _refuse_difference(choice, method, request, token_ids, _cached(patch, request, token_ids), rounding)
        rounding = max(DRIFT, 2 * rounding)
    _refuse_difference(choice, method, request, token_ids, _plain(patch, request, token_ids), rounding)


def _refuse_difference(
    choice: EngineChoice,
    method: Method,
    request: EngineRequest,
    token_ids: list[int],
    logits: torch.Tensor,
    rounding: float,
) -> None:
    expected, spread = logits.log_softmax(-1), logits.amax(-1) - logits.median(-1).values
    for step, found in enumerate(request.logprobs):
        ids, values = zip((token_ids[step], found.logprob), *found.top, strict=True)
        difference = float((expected[step, list(ids)].cpu() - torch.tensor(values).double()).abs().max())
        if not difference <= rounding * float(spread[step]):  # neither is NaN
            raise UnsupportedModel(
                f"the {choice} does not compute what its own forward computes under {method.method}. At token "
                f"{len(request.prompt_ids) + step} log-probabilities differ by {difference:.2g}. The largest logit is "
                f"{float(spread[step]):.2g} above the median, and rounding makes {rounding:g} of that at most"
            )


def _plain(patch: Patched, request: EngineRequest, token_ids: list[int]) -> torch.Tensor:
    """float64 logits [NEW, vocabulary] of one forward without a cache."""
    return _forward(patch, request, [*request.prompt_ids, *token_ids[:-1]], None, 0)[0][-NEW:]


def _cached(patch: Patched, request: EngineRequest, token_ids: list[int]) -> torch.Tensor:
    """float64 logits [NEW, vocabulary] of the prompt, then of one token at a time from the model's own cache."""
    logits, cache = _forward(patch, request, request.prompt_ids, None, 0)
    every = [logits[-1]]
    for position, token in enumerate(token_ids[:-1], len(request.prompt_ids)):
        logits, cache = _forward(patch, request, [token], cache, position)
        every.append(logits[-1])
    return torch.stack(every)


@torch.no_grad()
def _forward(
    patch: Patched, request: EngineRequest, tokens: list[int], cache: Any, start: int
) -> tuple[torch.Tensor, Any]:
    """(float64 logits [tokens, vocabulary], cache) of one sequence alone."""
    device = patch.model.device
    output = patch.model(
        input_ids=torch.tensor([tokens], device=device),
        position_ids=encode(torch.arange(start, start + len(tokens), device=device)[None], request.slot),
        cache=cache,
        use_cache=True,
    )
    return output.logits[0].double(), getattr(output, "cache", None)
