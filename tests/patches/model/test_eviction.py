"""Keys that no query can reach leave the cache, and nothing changes but the memory."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from patches import encode, patched
from patches.model.attention.eviction import evict
from tests.methods import ROWS, Fields
from tests.models import tiny_model, tiny_tokens
from tests.patches.forward import logits_of, relative, slot_of

LENGTH, CHUNK = 90, 7
WINDOWED: dict[str, tuple[Fields, int]] = {
    "positions by cache index": ({"method": "streaming", "sink_tokens": 3, "window": 20}, 23),
    "positions in the text": ({"method": "streaming", "sink_tokens": 3, "window": 20, "absolute_positions": True}, 23),
    "window alone": ({"method": "streaming", "sink_tokens": 0, "window": 20}, 20),
    "distance cap": ({"method": "lm_infinite", "n_global": 5, "n_local": 16, "limit_distance": 30}, 21),
}


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("chunk", [CHUNK, 1])
@torch.no_grad()
def test_evicted_equals_masked(name: str, chunk: int) -> None:
    fields, most = WINDOWED[name]
    model, tokens = tiny_model("llama", attn_implementation="sdpa")[1], tiny_tokens(2, LENGTH)
    with patched(model) as patch:
        slot = slot_of(patch, fields, LENGTH)
        expected = logits_of(model, tokens, slot)
        cache, parts = DynamicCache(config=model.config), []
        for start in range(0, LENGTH, chunk):
            position_ids = encode(torch.arange(start, min(start + chunk, LENGTH))[None], slot)
            new = tokens[:, start : start + chunk]
            parts.append(model(new, position_ids=position_ids, cache=cache, use_cache=True).logits)
            patch.evict(cache, slot)
            assert all(layer.keys.shape[-2] == min(start + new.shape[1], most - 1) for layer in cache.layers)
        assert relative(torch.cat(parts, dim=1), expected) < 2e-5
        assert relative(expected, logits_of(model, tokens)) > 0.01, "the window must matter"


@pytest.mark.parametrize("row", [row for row in ROWS if row.covers_all and row.rotates], ids=lambda row: row.name)
def test_methods_that_reach_every_key_keep_every_key(row: object) -> None:
    model = tiny_model("llama", head_dim=64)[1]
    with patched(model) as patch:
        for fields in row.requests:  # type: ignore[attr-defined]
            assert patch.slots[slot_of(patch, fields, LENGTH)].recipe.sink_window is None


def test_a_model_whose_layers_differ_keeps_its_cache() -> None:
    """A layer without rotation may count the cache's tokens, so nothing is dropped there."""
    model, tokens = tiny_model("smollm3")[1], tiny_tokens(1, 40)
    with patched(model) as patch, torch.no_grad():
        slot = slot_of(patch, WINDOWED["window alone"][0], 40)
        cache = DynamicCache(config=model.config)
        model(tokens, position_ids=encode(torch.arange(40)[None], slot), cache=cache, use_cache=True)
        patch.evict(cache, slot)
        assert all(layer.keys.shape[-2] == 40 for layer in cache.layers)


def test_a_window_of_one_keeps_the_first_tokens_only() -> None:
    cache = DynamicCache()
    cache.update(torch.arange(6.0).reshape(1, 1, 6, 1), torch.zeros(1, 1, 6, 1), 0)
    evict(cache, 2, 1)
    assert cache.layers[0].keys.flatten().tolist() == [0.0, 1.0]
