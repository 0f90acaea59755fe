"""Decoding and chunked prefill through transformers' caches equal one full pass, for every shape of recipe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

from patches import RopeGeometry, encode, patched
from tests.methods import has_effect, one_per_shape, request_id, rows
from tests.models import ROPE_THETA, tiny_model, tiny_tokens
from tests.patches.forward import chunked_logits, left_padded, logits_of, relative, slot_of

TOLERANCE = 2e-5
TRAINED = 32
LENGTHS = [44, 29, 3]
"""Past the trained 32, short of it, and so short that whole chunks of the batch are its padding."""

CHUNKS = {
    "step_by_step": [40, 1, 1, 1, 1],
    "uneven_chunks": [9, 1, 17, 2, 5, 10],
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped_heads": ("llama", {}),
    "one_key_per_head": ("llama", {"num_key_value_heads": 4}),
    "sliding_window": ("mistral", {"sliding_window": 12}),
    "every_second_layer_slides": ("gemma2", {"sliding_window": 12}),
}
GEOMETRY = RopeGeometry(16, 16, ROPE_THETA, TRAINED, TRAINED, num_attention_heads=4)
REQUESTS = one_per_shape([f for row in rows(8, TRAINED) for f in row.requests], GEOMETRY, max(LENGTHS))


def cache_of(kind: str, model: PreTrainedModel) -> Any:
    if kind == "static":  # its keys reach past what was seen, up to the end of the buffer
        return StaticCache(config=model.config, max_cache_len=max(LENGTHS) + 20)
    return DynamicCache(config=model.config)


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    made = {}
    for name, (family, overrides) in MODELS.items():
        attention = "eager" if family == "gemma2" else "sdpa"
        sizes = {"max_position_embeddings": TRAINED, **overrides}
        made[name] = tiny_model(family, attn_implementation=attention, **sizes)[1]
    return made


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("grouped_heads", "dynamic"),
        *(pytest.param(name, "dynamic", marks=pytest.mark.slow) for name in [*MODELS][1:]),
        *(pytest.param(name, "static", marks=pytest.mark.slow) for name in ("grouped_heads", "sliding_window")),
    ],
)
def test_a_cache_gives_what_one_pass_gives(kind: str, name: str, models: dict[str, PreTrainedModel]) -> None:
    model = models[name]
    tokens = [tiny_tokens(1, length, seed=length)[0] for length in LENGTHS]
    ids, mask, positions = left_padded(tokens)
    with patched(model) as patch:
        for fields in (each for each in REQUESTS if has_effect(each, patch.geometry, max(LENGTHS))):
            slots = [slot_of(patch, fields, len(row)) for row in tokens]
            encoded = encode(positions, torch.tensor(slots)[:, None])
            whole = [logits_of(model, row[None], slot)[0] for row, slot in zip(tokens, slots, strict=True)]
            for label, chunks in CHUNKS.items():
                result = chunked_logits(model, ids, mask, encoded, cache=cache_of(kind, model), chunks=chunks)
                for number, expected in enumerate(whole):
                    case = (request_id(fields), label, len(expected))
                    assert relative(result[number, mask[number].bool()], expected) < TOLERANCE, case


def test_a_cache_filled_under_one_encoding_belongs_to_it(models: dict[str, PreTrainedModel]) -> None:
    """A prefix may be shared between requests of one encoding only."""
    model = models["grouped_heads"]
    tokens = tiny_tokens(1, 44)
    mask = torch.ones_like(tokens)
    with patched(model) as patch:
        a, b = (slot_of(patch, fields, 44) for fields in ({"method": "linear", "factor": 4.0}, {"method": "default"}))
        encoded = torch.cat([encode(torch.arange(40), a), encode(torch.arange(40, 44), b)])[None]
        crossed = chunked_logits(model, tokens, mask, encoded, cache=DynamicCache(config=model.config), chunks=[40, 4])
        assert relative(crossed[:, :40], logits_of(model, tokens, a)[:, :40]) < TOLERANCE
        assert relative(crossed[:, 40:], logits_of(model, tokens, b)[:, 40:]) > 0.01
