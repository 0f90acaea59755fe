"""Caches with room for later tokens keep what transformers' caches keep, in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from patches import patched
from service.engine.limits import EngineLimits
from service.engine.padded import PaddedLoop, sequence
from service.engine.padded.caches import sizes
from service.engine.padded.room import RoomyLayer, make_room
from service.engine.padded.sequence import Batch
from service.engine.request import EngineRequest, SamplingParams
from service.evaluation.scoring import token_scores
from service.evaluation.scoring.token_scores import Reading, token_nll
from tests.field.configurations import tiny_model as hybrid_model
from tests.models import EAGER_ONLY, tiny_config, tiny_model, tiny_tokens
from tests.service.evaluation.prompting import finish

LIMITS = EngineLimits(cache_tokens=8192, score_tokens=64, max_batch_tokens=64)


def states(tokens: int, dim: int = 8) -> torch.Tensor:
    return torch.randn(2, 3, tokens, dim)


def appended(layers: list[DynamicLayer], tokens: int) -> None:
    """The same new states, whose values are wider than their keys, to every layer."""
    keys, values = states(tokens), states(tokens, 12)
    for layer in layers:
        layer.update(keys, values)


def without_gap(each: torch.Tensor | None) -> torch.Tensor:
    """As eviction leaves it."""
    assert each is not None
    return torch.cat((each[..., :2, :], each[..., -4:, :]), -2)


def test_it_keeps_what_a_dynamic_layer_keeps() -> None:
    cache, plain = DynamicCache(), DynamicLayer()
    first = states(5), states(5, 12)
    cache.update(*first, 0)
    plain.update(*first)
    make_room(cache, 16)
    layers = [plain, cache.layers[0]]
    appended(layers, 3)
    for layer in layers:
        layer.crop(-2)
    appended(layers, 9)
    for layer in layers:
        layer.keys, layer.values = without_gap(layer.keys), without_gap(layer.values)
    appended(layers, 20)
    appended(layers, 1)
    assert torch.equal(layers[1].keys, plain.keys)
    assert torch.equal(layers[1].values, plain.values)


def test_chunks_are_written_in_place() -> None:
    cache = DynamicCache()
    cache.update(states(5), states(5, 12), 0)
    make_room(cache, 16)
    layer = cache.layers[0]
    addresses = set()
    for _ in range(11):
        layer.update(states(1), states(1, 12))
        addresses.add((layer.keys.data_ptr(), layer.values.data_ptr()))
    assert len(addresses) == 1
    assert sizes(cache) == (2 * 3 * 16 * (8 + 12) * 4, 0)


def test_layers_that_slide_stay() -> None:
    cache = DynamicCache(config=tiny_config("gemma2"))
    kept = {type(layer).__name__ for layer in cache.layers}
    make_room(cache, 100)
    assert kept == {"DynamicSlidingWindowLayer", "DynamicLayer"}
    assert {type(layer) for layer in cache.layers} == {DynamicSlidingWindowLayer, RoomyLayer}


@pytest.mark.parametrize("kind", ["falcon_h1", "qwen3_next"])
def test_layers_with_states_have_room_too(kind: str) -> None:
    """Each layer of a Falcon-H1 attends and has states; a layer of a Qwen3-Next does one of both."""
    model, found = hybrid_model(kind), []
    for room in (0, 30):
        with torch.no_grad():
            cache = model(tiny_tokens(2, 9), use_cache=True).cache
            if room:
                make_room(cache, room)
            found.append([model(tiny_tokens(2, 1), cache=cache).logits for _ in range(5)])
    assert any(isinstance(layer, RoomyLayer) for layer in cache.layers)
    assert all(torch.equal(*both) for both in zip(*found, strict=True))


class Addresses:
    """Address of the keys of the first layer that attends, after each forward of a padded engine, by its rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: dict[int, list[int]] = {}
        computed = Batch.computed

        def noted(batch: Batch, cache: Any, new_tokens: int) -> None:
            computed(batch, cache, new_tokens)
            keys = next(layer.keys for layer in batch.cache.layers if isinstance(layer, DynamicLayer))
            self.found.setdefault(len(batch.rows), []).append(keys.data_ptr())

        monkeypatch.setattr(Batch, "computed", noted)


def test_decode_steps_write_in_place_and_batches_give_the_tokens_of_single_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    addresses = Addresses(monkeypatch)
    found = []
    for together in (False, True):
        with patched(tiny_model("llama")[1]) as patch:
            engine = PaddedLoop(patch, LIMITS, together=together)
            slot = patch.slots.acquire(patch.resolve({"method": "default"}, 100))
            found.append(engine.run_to_end([request(slot, n) for n in (20, 23, 31)]))
    assert found[0] == found[1]
    steps = addresses.found[3]
    assert len(steps) > 20
    assert len(set(steps)) == 1


def test_an_encoding_that_forgets_has_no_room_in_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms: list[int] = []
    monkeypatch.setattr(sequence, "make_room", lambda cache, tokens: rooms.append(tokens))
    with patched(tiny_model("llama")[1]) as patch:
        engine = PaddedLoop(patch, LIMITS, together=True)
        resolved = patch.resolve("streaming:window=8,sink_tokens=2", 100)
        streaming = request(patch.slots.acquire(resolved), 20)
        streaming.sink_window = patch.sink_window(resolved)
        engine.run_to_end([streaming, request(patch.slots.acquire(patch.resolve("default", 100)), 21)])
    assert rooms == [21]


def request(slot: int, tokens: int) -> EngineRequest:
    return EngineRequest(tiny_tokens(1, tokens)[0].tolist(), slot, None, 24, SamplingParams(ignore_eos=True))


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3"])
@pytest.mark.parametrize("method", ["default", "self_extend", "dual_chunk", "streaming", "alibi"])
def test_room_changes_no_bit_of_a_score(family: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tiny_tokens(1, 150)[0].tolist()
    _, model = tiny_model(family, attn_implementation="eager" if family in EAGER_ONLY else "sdpa")
    with patched(model) as patch:
        slot = patch.slots.acquire(patch.resolve({"method": method}, len(ids)))
        with_room = finish(token_nll(patch, ids, slot, 32))
        monkeypatch.setattr(token_scores, "make_room", lambda *_: None)
        assert (finish(token_nll(patch, ids, slot, 32)) == with_room).all()


@pytest.mark.parametrize(("method", "kind"), [("default", RoomyLayer), ("streaming", DynamicLayer)])
def test_a_sequence_that_evicts_needs_no_room(method: str, kind: type) -> None:
    ids = tiny_tokens(1, 150)[0].tolist()
    with patched(tiny_model("llama")[1]) as patch:
        reading = Reading(patch, patch.slots.acquire(patch.resolve({"method": method}, len(ids))), len(ids))
        finish(reading.prefill(ids, 32))
    assert {type(layer) for layer in reading.cache.layers} == {kind}
