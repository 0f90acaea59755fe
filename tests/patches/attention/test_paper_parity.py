"""The whole path against the papers in float64: tokens into a patched model, attention output out.

The model's attention input is rebuilt by hand in float64 from its weights; the oracle computes the rest.
Norms and projections, which no paper mentions, are plain matrix arithmetic.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from patches import RopeGeometry, encode, parse, patched, resolve
from patches.attention import fused
from patches.attention.layer import Layer
from patches.batch.segments import Batch
from tests import oracles
from tests.methods import Fields, has_effect, one_per_shape, request_id, rows
from tests.models import ROPE_THETA, tiny_model, tiny_tokens
from tests.patches.forward import chunked_logits, slot_of, written

TOLERANCE = 2e-5
TRAINED, LONGEST, LENGTH, HEADS, HEAD_DIM = 32, 64, 40, 4, 16
WHOLE = [fields for row in rows(HEAD_DIM // 2, TRAINED) for fields in row.requests]
PARTLY = [fields for row in rows(HEAD_DIM // 8, TRAINED) if not row.whole_head for fields in row.requests]
"""The requests that a model can take whose heads rotate a quarter of their dimensions."""
TEMPERED: Fields = {"method": "none", "attention_temperature": 0.4}


def geometry_of(rotary_dim: int, interleaved: bool = False) -> RopeGeometry:
    return RopeGeometry(HEAD_DIM, rotary_dim, ROPE_THETA, TRAINED, LONGEST, HEADS, interleaved=interleaved)


def one_layer(heads: int = HEADS, **overrides: Any) -> PreTrainedModel:
    family = "mistral" if "sliding_window" in overrides else "llama"
    sizes = {"num_hidden_layers": 1, "num_attention_heads": heads, "max_position_embeddings": TRAINED}
    return tiny_model(family, attn_implementation="sdpa", **sizes, **overrides)[1]


def projections(model: Any, tokens: torch.Tensor) -> list[np.ndarray]:
    """Query, key and value of the layer before any rotation, float64 [heads, length, head_dim] each."""
    layer = model.model.layers[0]
    hidden = model.model.embed_tokens.weight[tokens[0]].double()
    norm = layer.input_layernorm
    hidden = hidden * (hidden.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt() * norm.weight.double()
    attention = layer.self_attn
    projected = [hidden @ p.weight.double().T for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
    return [x.view(len(x), -1, HEAD_DIM).transpose(0, 1).detach().numpy() for x in projected]


def attention_outputs(model: Any) -> tuple[list[torch.Tensor], Any]:
    """Fills with what the layer's attention hands on, [1, new tokens, heads x head_dim] per forward."""
    seen: list[torch.Tensor] = []
    hook = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    return seen, hook


def difference(result: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(result - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("window", [None, 12], ids=["whole", "window"])
@pytest.mark.parametrize("cached", [False, True], ids=["one_pass", "cached"])
def test_attention_of_a_patched_model(cached: bool, window: int | None) -> None:
    model = one_layer() if window is None else one_layer(sliding_window=window)
    tokens = tiny_tokens(1, LENGTH)
    states = projections(model, tokens)
    oracle = oracles.Model(ROPE_THETA, HEAD_DIM, TRAINED, LONGEST, HEADS, HEAD_DIM**-0.5, window=window)
    # A prefill in two chunks, then single steps: the routes that a full pass does not take.
    chunks = [17, 15, *[1] * 8] if cached else [LENGTH]
    seen, hook = attention_outputs(model)
    with patched(model) as patch, hook:
        requests = [fields for fields in WHOLE if has_effect(fields, patch.geometry, LENGTH)]
        for fields in [*one_per_shape(requests, geometry_of(HEAD_DIM), LENGTH), TEMPERED]:
            seen.clear()
            position_ids = encode(torch.arange(LENGTH)[None], slot_of(patch, fields, LENGTH))
            cache = DynamicCache(config=model.config)
            chunked_logits(model, tokens, torch.ones_like(tokens), position_ids, cache=cache, chunks=chunks)
            result = torch.cat(seen, dim=1).view(LENGTH, HEADS, HEAD_DIM).transpose(0, 1)
            expected = oracles.attention(*states, oracles.encoding(fields, oracle, LENGTH), oracle)
            assert difference(result.numpy(), expected) < TOLERANCE, request_id(fields)


@pytest.mark.parametrize("interleaved", [False, True], ids=["half_split", "interleaved"])
def test_fused_attention_with_a_part_rotated(interleaved: bool) -> None:
    """GPT-NeoX's geometry: a quarter of each head rotates, and a factor on cos and sin leaves the rest alone."""
    rotary_dim = HEAD_DIM // 4
    geometry = geometry_of(rotary_dim, interleaved)
    oracle = oracles.Model(ROPE_THETA, rotary_dim, TRAINED, LONGEST, HEADS, 0.3, interleaved, head_dim=HEAD_DIM)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((heads, LENGTH, HEAD_DIM)) for heads in (HEADS, 2, 2))
    for fields in one_per_shape(PARTLY, geometry, LENGTH):
        expected = oracles.attention(q, k, v, oracles.encoding(fields, oracle, LENGTH), oracle)
        resolved = resolve(parse(fields), geometry, LENGTH)
        query, key, value = (torch.tensor(x, dtype=torch.float32)[None] for x in (q, k, v))
        query, key = written(query, resolved), written(key, resolved)
        result = fused.attend(query, key, value, resolved, Batch([]), Layer(0.3), q_start=0)
        assert difference(result[0].numpy(), expected) < TOLERANCE, request_id(fields)
        last = fused.attend(query[:, :, -1:], key, value, resolved, Batch([]), Layer(0.3), q_start=LENGTH - 1)
        assert difference(last[0].numpy(), expected[:, -1:]) < TOLERANCE, request_id(fields)


@pytest.mark.parametrize("heads", [2, 6, 12])
@torch.no_grad()
def test_alibi_on_any_number_of_heads(heads: int) -> None:
    model = one_layer(heads, num_key_value_heads=2, hidden_size=16 * heads)
    tokens = tiny_tokens(1, LENGTH)
    oracle = oracles.Model(ROPE_THETA, HEAD_DIM, TRAINED, LONGEST, heads, HEAD_DIM**-0.5)
    how = oracles.encoding({"method": "alibi"}, oracle, LENGTH)
    expected = oracles.attention(*projections(model, tokens), how, oracle)
    seen, hook = attention_outputs(model)
    with patched(model) as patch, hook:
        seen.clear()  # of the two tokens that patching tried
        model(tokens, position_ids=encode(torch.arange(LENGTH)[None], slot_of(patch, {"method": "alibi"}, LENGTH)))
    assert difference(seen[0].view(LENGTH, heads, HEAD_DIM).transpose(0, 1).numpy(), expected) < TOLERANCE
