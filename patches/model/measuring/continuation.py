"""Measurement of a model's cache: do its layers go on with a second chunk of tokens as with single ones?

Some recurrent layers start from an empty state whenever a forward has several tokens. The selective scan of Mamba, for
one, has no initial state in transformers 5.24. The numbers of such layers are right for a whole prompt and for single
tokens only. A model that keeps its states in its modules returns no cache at all (RecurrentGemma).
"""

from __future__ import annotations

from typing import Any

import torch

from patches.model.measuring.forwards import evaluating
from patches.model.measuring.geometry import WHOLE_PROMPTS, text_config
from patches.model.measuring.rounding import TOLERANCE

TOKENS = 8


@torch.no_grad()
def returns_cache(model: Any) -> bool:
    """True if a forward returns a cache."""
    return _logits(model, torch.ones(1, 2, dtype=torch.long, device=model.device), None, 0)[1] is not None


@torch.no_grad()
def continues(model: Any, vocab_size: int) -> bool:
    """True if two chunks give the logits of one: ``model`` reads ``TOKENS`` tokens, at once and by halves.

    Windows may be longer than that, so layers of ``WHOLE_PROMPTS`` are known by their type.
    """
    if WHOLE_PROMPTS in (getattr(text_config(model), "layer_types", None) or ()):
        return False
    tokens = torch.linspace(1, vocab_size - 1, TOKENS, device=model.device).long()[None]
    whole = _logits(model, tokens, None, 0)[0][TOKENS // 2 :]
    _, cache = _logits(model, tokens[:, : TOKENS // 2], None, 0)
    second, _ = _logits(model, tokens[:, TOKENS // 2 :], cache, TOKENS // 2)
    return _alike(second, whole, model)


@torch.no_grad()
def keeps_texts_apart(model: Any, vocab_size: int) -> bool:
    """True if a text has the same logits alone and behind another one in its row."""
    tokens = torch.linspace(1, vocab_size - 1, TOKENS, device=model.device).long()[None]
    second = TOKENS // 2
    positions = torch.arange(TOKENS, device=model.device)[None] % second
    with evaluating(model):
        behind = model(input_ids=tokens, position_ids=positions, use_cache=True).logits[0, second:].double()
        alone = _logits(model, tokens[:, second:], None, 0)[0]
    return _alike(behind, alone, model)


def _alike(logits: torch.Tensor, expected: torch.Tensor, model: Any) -> bool:
    spread = expected.amax(-1) - expected.median(-1).values
    return bool(((logits - expected).abs().amax(-1) <= TOLERANCE[model.dtype] * spread).all())


def _logits(model: Any, tokens: torch.Tensor, cache: Any, start: int) -> tuple[torch.Tensor, Any]:
    """(float64 logits [tokens, vocabulary], cache or None) after a forward."""
    position_ids = torch.arange(start, start + tokens.shape[1], device=tokens.device)[None]
    output = model(input_ids=tokens, position_ids=position_ids, cache=cache, use_cache=True)
    return output.logits[0].double(), getattr(output, "cache", None)
