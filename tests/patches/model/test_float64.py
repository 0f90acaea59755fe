"""A float64 model on every route, against transformers' own float64 forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from patches import encode, patched
from service.models.architecture import FAMILIES as DEMO_FAMILIES
from tests.methods import Fields, request_id
from tests.models import EAGER_ONLY, FAMILIES, OTHER_FAMILIES, TRAINED_LENGTH, demo_model, tiny_model, tiny_tokens
from tests.patches.forward import chunked_logits, left_padded, logits_of, relative, slot_of
from tests.patches.model.architectures.test_architectures import LENGTHS, REQUESTS
from tests.patches.model.architectures.test_other_families import WITHOUT_SDPA
from tests.patches.model.library.test_transformers_parity import greedy

EXACT = 1e-13
SINGLE = 1e-6
"""For models of which transformers computes a part in float32 (a softmax, a rotation). Also for tables of cos and sin
read at another position, because tables are float32."""

NOT_IN_FLOAT64 = {"mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "xglm"}
"""transformers' own forward refuses float64: grouped products of experts, a mask."""

SOFTMAX_IN_FLOAT32 = {"gpt_neo", "bloom", "mpt"}
CARRIED = [name for name in (*FAMILIES, *OTHER_FAMILIES) if name not in NOT_IN_FLOAT64]


def double_model(family: str, **sizes: Any) -> PreTrainedModel:
    attention = "eager" if family in EAGER_ONLY | WITHOUT_SDPA else "sdpa"
    model = tiny_model(family, attn_implementation=attention, **sizes)[1].double()
    assert model.dtype == torch.float64
    return model


@torch.no_grad()
def unpatched(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(tokens, use_cache=False).logits
    assert result.dtype == torch.float64
    return result


@pytest.mark.parametrize("family", CARRIED)
def test_default_is_the_unpatched_model(family: str) -> None:
    """Prefill and cached decoding, of kernels, masks, soft limits, biases and temperatures that layers have."""
    tolerance = SINGLE if family in SOFTMAX_IN_FLOAT32 else EXACT
    model, tokens = double_model(family), tiny_tokens(2, TRAINED_LENGTH - 8)
    expected, (expected_tokens, expected_steps) = unpatched(model, tokens), greedy(model, tokens)
    with patched(model):
        assert relative(logits_of(model, tokens), expected) < tolerance
        decoded, steps = greedy(model, tokens)
    assert torch.equal(decoded, expected_tokens)
    assert relative(steps, expected_steps) < tolerance


@pytest.mark.parametrize("family", DEMO_FAMILIES)
def test_demo_families(family: str) -> None:
    """Relative scores, T5's table, and positions added to tokens."""
    model, tokens = demo_model(family).double(), tiny_tokens(2, TRAINED_LENGTH)
    expected = unpatched(model, tokens)
    with patched(model):
        assert relative(logits_of(model, tokens), expected) < SINGLE


PLAIN_BY_BANDS: list[Fields] = [
    {"method": "self_extend", "group_size": 1, "neighbor_window": 16},
    {"method": "string", "shifted_offset": 20, "small_local_value": 20},
    {"method": "streaming", "sink_tokens": 4, "window": 30, "absolute_positions": True},
    {"method": "dual_chunk", "chunk_size": 64, "local_window": 0},
]


@pytest.mark.parametrize("fields", PLAIN_BY_BANDS, ids=request_id)
def test_bands_that_leave_rope_as_it_is(fields: Fields) -> None:
    """Whole, in chunks and token by token. The window of ``streaming`` covers all 30 tokens."""
    model, tokens = double_model("llama"), tiny_tokens(1, 30)
    expected = unpatched(model, tokens)
    with patched(model) as patch:
        slot = slot_of(patch, fields, 30)
        whole = logits_of(model, tokens, slot)
        parts = in_chunks(model, tokens, slot, [13, 9, 1, 1, 6])
    assert relative(whole, expected) < SINGLE
    assert relative(parts, expected) < SINGLE


@pytest.mark.parametrize("chunks", [[60], [33, 20, 1, 1, 5]], ids=["prefill", "chunks"])
def test_a_window_that_a_request_asks_for_is_that_of_a_model(chunks: list[int]) -> None:
    """Masks are finite numbers, whose most negative one depends on the dtype."""
    fields: Fields = {"method": "streaming", "sink_tokens": 0, "window": 24, "absolute_positions": True}
    tokens = tiny_tokens(1, 60)
    expected = unpatched(double_model("mistral", sliding_window=24), tokens)
    model = double_model("mistral")
    assert relative(unpatched(model, tokens), expected) > 0.01
    with patched(model) as patch:
        result = in_chunks(model, tokens, slot_of(patch, fields, 60), chunks)
    assert relative(result, expected) < EXACT


def in_chunks(model: PreTrainedModel, tokens: torch.Tensor, slot: int, chunks: list[int]) -> torch.Tensor:
    encoded = encode(torch.arange(tokens.shape[1])[None], slot)
    cache = DynamicCache(config=model.config)
    return chunked_logits(model, tokens, torch.ones_like(tokens), encoded, cache=cache, chunks=chunks)


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3"])
def test_rows_of_a_mixed_batch_are_what_they_are_alone(family: str) -> None:
    model = double_model(family)
    tokens = [tiny_tokens(1, length, seed=length)[0] for length in LENGTHS]
    ids, mask, positions = left_padded(tokens)
    with patched(model) as patch:
        slots = [slot_of(patch, fields, len(row)) for fields, row in zip(REQUESTS, tokens, strict=True)]
        alone = [logits_of(model, row[None], slot)[0] for row, slot in zip(tokens, slots, strict=True)]
        cache = DynamicCache(config=model.config)
        encoded = encode(positions, torch.tensor(slots)[:, None])
        mixed = chunked_logits(model, ids, mask, encoded, cache=cache, chunks=[40, 17, 11, 1, 1])
    for row, expected in enumerate(alone):
        assert relative(mixed[row, mask[row].bool()], expected) < SINGLE, REQUESTS[row]
