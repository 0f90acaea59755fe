"""One forward at a time: its state ends with it, whatever ends it, and nothing nests."""

from __future__ import annotations

import gc
import inspect
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from patches import AttentionMass, encode, packed_batch, patched
from tests.models import tiny_model, tiny_tokens
from tests.patches.forward import logits_of, slot_of

YARN = {"method": "yarn", "factor": 4.0}


def test_forwards_do_not_nest() -> None:
    model, tokens = tiny_model("llama")[1], tiny_tokens(1, 20)
    with patched(model) as patch:
        expected = logits_of(model, tokens, slot_of(patch, YARN, 20))

        def again(*_: Any) -> None:
            logits_of(model, tokens)

        handle = model.model.layers[1].register_forward_pre_hook(again)
        with pytest.raises(RuntimeError, match="forwards of a patched model do not nest"):
            logits_of(model, tokens)
        handle.remove()
        assert torch.equal(logits_of(model, tokens, slot_of(patch, YARN, 20)), expected), "the state has ended"


def test_two_models_may_nest() -> None:
    outer, inner, tokens = tiny_model("llama")[1], tiny_model("qwen3")[1], tiny_tokens(1, 20)
    with patched(outer), patched(inner):
        expected = logits_of(inner, tokens)
        seen: list[torch.Tensor] = []
        outer.model.layers[0].register_forward_pre_hook(lambda *_: seen.append(logits_of(inner, tokens)))
        logits_of(outer, tokens)
    assert torch.equal(seen[0], expected)


def test_an_interrupted_forward_leaves_no_state() -> None:
    model, tokens = tiny_model("llama")[1], tiny_tokens(1, 20)
    with patched(model):
        expected = logits_of(model, tokens)

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        handle = model.model.layers[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            logits_of(model, tokens)
        handle.remove()
        assert torch.equal(logits_of(model, tokens), expected)


def test_a_part_of_the_model_has_no_forward() -> None:
    model, tokens = tiny_model("llama")[1], tiny_tokens(1, 20)
    with patched(model), pytest.raises(RuntimeError, match="call the patched model, not a part"):
        model.model(tokens)


def test_packed_rows_and_observers_do_not_nest() -> None:
    model, tokens = tiny_model("llama")[1], tiny_tokens(1, 20)
    with patched(model) as patch:
        paged = {"cu_seq_lens_k": torch.tensor([0, 20])}
        mass = AttentionMass(0, 20)
        with patch.packed(packed_batch([(0, 0, 20)]), paged):
            with pytest.raises(RuntimeError, match="do not nest"), patch.observing(mass.observe):
                raise AssertionError("never entered")
            packed = logits_of(model, tokens)
        assert torch.equal(packed, logits_of(model, tokens))
        model.model.register_forward_pre_hook(lambda *_: patch.observing(mass.observe).__enter__())
        with pytest.raises(RuntimeError, match="begin outside of a forward"):
            logits_of(model, tokens)
        assert mass.layers == []


def test_a_batch_ends_with_its_forward() -> None:
    """The garbage collector would keep its tables for a while."""
    model, tokens = tiny_model("llama")[1], tiny_tokens(1, 20)
    gc.disable()
    try:
        with patched(model) as patch:
            batch = packed_batch([(0, 0, 20)])
            ended = weakref.ref(batch)
            with patch.packed(batch, {"cu_seq_lens_k": torch.tensor([0, 20])}):
                logits_of(model, tokens)
            del batch
            assert ended() is None
    finally:
        gc.enable()


def test_a_sequence_in_places_has_a_name() -> None:
    with pytest.raises(ValueError, match="names: each sequence in places needs one"):
        packed_batch([(0, 20, 1)], [[range(64)]])


def test_threads_have_forwards_of_their_own() -> None:
    model = tiny_model("llama")[1]
    rows = [tiny_tokens(1, 10 + length) for length in range(24)]
    with patched(model) as patch:
        slots = [0, slot_of(patch, YARN, 40), slot_of(patch, {"method": "self_extend", "group_size": 2}, 40)] * 8
        expected = list(map(logits_of, [model] * 24, rows, slots))
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(logits_of, [model] * 24, rows, slots))
    assert all(map(torch.equal, results, expected))


def test_the_signature_of_the_model_gains_the_encoding() -> None:
    model = tiny_model("llama")[1]
    before = inspect.signature(model.forward)
    with patched(model):
        parameters = dict(inspect.signature(model.forward).parameters)
        assert parameters.pop("position_encoding").default is None
        assert parameters == dict(before.parameters)
    assert inspect.signature(model.forward) == before


def test_positions_that_are_not_given_count_unpadded_tokens() -> None:
    model, tokens = tiny_model("llama")[1], tiny_tokens(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    with patched(model), torch.no_grad():
        given = (mask.cumsum(1) - 1).clamp_min(0)
        expected = model(tokens, attention_mask=mask, position_ids=encode(given, 0), use_cache=False).logits
        assert torch.equal(model(tokens, attention_mask=mask, use_cache=False).logits, expected)
