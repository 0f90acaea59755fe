"""Calls of a patched model: caches that go on from one to the next, and arguments without a name."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from patches import Patched, patched
from tests.models import tiny_model, tiny_tokens
from tests.patches.forward import relative

TOLERANCE = 2e-5


@pytest.mark.parametrize("copied", [False, True])
def test_a_cache_continues_under_its_own_encoding_only(copied: bool, patch: Patched) -> None:
    tokens, yarn = tiny_tokens(1, 40), patch.encoding("yarn:4")
    with torch.no_grad():
        expected = patch.model(tokens, **yarn).logits[:, -2:]
        written = {"yarn": patch.model(tokens[:, :-2], **yarn), "none": patch.model(tokens[:, :-2])}
        as_tuple = patch.model(tokens[:, :-2], return_dict=False, **yarn)
        caches = {name: output.cache for name, output in written.items()} | {"tuple": as_tuple[1]}
        caches = copy.deepcopy(caches) if copied else caches
        refused = (("yarn", {}), ("tuple", {}), ("yarn", patch.encoding("default")), ("none", yarn))
        for name, other in refused:
            with pytest.raises(ValueError, match="cache: its keys were written under another encoding"):
                patch.model(tokens[:, -2:], cache=caches[name], **other)
        for name in ("yarn", "tuple"):
            assert relative(patch.model(tokens[:, -2:], cache=caches[name], **yarn).logits, expected) < TOLERANCE
        again = patch.model(tokens[:, -2:], cache=caches["none"], **patch.encoding("default")).logits
        assert relative(again, patch.model(tokens).logits[:, -2:]) < TOLERANCE


def test_an_empty_cache_takes_any_encoding(patch: Patched) -> None:
    tokens = tiny_tokens(1, 40)
    with torch.no_grad():
        cache = patch.model(tokens, **patch.encoding("yarn:4")).cache
        cache.crop(-40)
        assert cache.get_seq_length() == 0
        plain = patch.model(tokens, cache=cache).logits
        assert relative(plain, patch.model(tokens).logits) < TOLERANCE
        patch.model(tokens[:, :1], cache=cache)
        both = patch.model(tokens.expand(2, -1), **patch.encoding(["yarn:4", "alibi"])).cache
        both.crop(-40)
        patch.model(tokens.expand(2, -1), cache=both, **patch.encoding("yarn:4"))
        with pytest.raises(ValueError, match="under another encoding"):
            patch.model(tokens.expand(2, -1), cache=both, **patch.encoding("alibi"))


def test_learned_keys_before_a_prompt_have_no_encoding(patch: Patched) -> None:
    """A prefix of peft is a cache that no forward wrote."""
    written = patch.model(tiny_tokens(1, 4)).cache
    prefix = DynamicCache([(layer.keys, layer.values) for layer in written.layers])
    patch.model(tiny_tokens(1, 9), cache=prefix, **patch.encoding("yarn:4"))
    with pytest.raises(ValueError, match="under another encoding"):
        patch.model(tiny_tokens(1, 9), cache=prefix)


def test_rows_of_a_cache_may_be_fewer(patch: Patched) -> None:
    tokens, chosen = tiny_tokens(2, 40), ["yarn:4", "alibi"]
    with torch.no_grad():
        cache = patch.model(tokens[:, :-2], **patch.encoding(chosen)).cache
        cache.batch_select_indices(torch.tensor([1]))
        result = patch.model(tokens[1:, -2:], cache=cache, **patch.encoding("alibi")).logits
        expected = patch.model(tokens[1:], **patch.encoding("alibi")).logits[:, -2:]
    assert relative(result, expected) < TOLERANCE


@torch.no_grad()
def test_each_row_of_a_cache_continues_under_its_own_encoding(patch: Patched) -> None:
    tokens, encodings = tiny_tokens(2, 40), ["yarn:4", "default"]
    expected = patch.model(tokens, **patch.encoding(encodings)).logits[:, -2:]
    cache = patch.model(tokens[:, :-2], **patch.encoding(encodings)).cache
    refused = (patch.encoding(encodings[::-1]), patch.encoding("yarn:4"), patch.encoding("default"), {})
    for other, row in zip(refused, (0, 1, 0, 0), strict=True):
        with pytest.raises(ValueError, match=f"cache: the keys of row {row} were written under another"):
            patch.model(tokens[:, -2:], cache=cache, **other)
    result = patch.model(tokens[:, -2:], cache=cache, **patch.encoding(encodings)).logits
    assert relative(result, expected) < TOLERANCE


CHANGES: dict[str, tuple[Callable[[DynamicCache], object], list[int]]] = {
    "reordered": (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
    "selected": (lambda cache: cache.batch_select_indices(torch.tensor([1, 1, 0])), [1, 1, 0]),
    "repeated": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
}
COPIES: dict[str, Callable[[DynamicCache], DynamicCache]] = {
    "itself": lambda cache: cache,
    "copied": copy.deepcopy,
    "pickled": lambda cache: pickle.loads(pickle.dumps(cache)),
}


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_encodings_of_a_cache_follow_its_rows(change: str, copied: str, patch: Patched) -> None:
    tokens, encodings = tiny_tokens(2, 40), ["yarn:4", "alibi"]
    expected = patch.model(tokens, **patch.encoding(encodings)).logits[:, -2:]
    original = patch.model(tokens[:, :-2], **patch.encoding(encodings)).cache
    cache = COPIES[copied](original)
    assert isinstance(cache, DynamicCache)
    apply, rows = CHANGES[change]
    apply(cache)
    wrong = patch.encoding([encodings[row] for row in (*rows[1:], rows[0])])
    with pytest.raises(ValueError, match="cache: the keys of row"):
        patch.model(tokens[rows, -2:], cache=cache, **wrong)
    own = patch.encoding([encodings[row] for row in rows])
    result = patch.model(tokens[rows, -2:], cache=cache, **own).logits
    assert relative(result, expected[rows]) < TOLERANCE
    if copied != "itself":
        again = patch.model(tokens[:, -2:], cache=original, **patch.encoding(encodings)).logits
        assert relative(again, expected) < TOLERANCE, "a copy has marks of its own"


@torch.no_grad()
def test_a_cache_of_several_encodings_is_freed_at_once(patch: Patched) -> None:
    """Without a collection of garbage, which comes too late for a GPU."""
    cache = patch.model(tiny_tokens(2, 9), **patch.encoding(["yarn:4", "alibi"])).cache
    seen = weakref.ref(cache)
    gc.disable()
    try:
        del cache
        assert seen() is None
    finally:
        gc.enable()


@torch.no_grad()
def test_a_cache_by_its_former_name(patch: Patched) -> None:
    tokens = tiny_tokens(1, 9)
    written = [patch.model(tokens[:, :-2], **patch.encoding("yarn:4")).cache for _ in range(2)]
    expected = patch.model(tokens[:, -2:], cache=written[0], **patch.encoding("yarn:4")).logits
    found = patch.model(tokens[:, -2:], past_key_values=written[1], **patch.encoding("yarn:4")).logits
    assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="cache: its keys were written under another encoding"):
        patch.model(tokens[:, -2:], past_key_values=written[1])
    with pytest.raises(TypeError, match="got cache and past_key_values, its former name"):
        patch.model(tokens[:, -2:], past_key_values=written[1], cache=written[0])


@pytest.mark.parametrize("family", ["llama", "gpt2", "mpt"])
@torch.no_grad()
def test_arguments_in_their_places_are_those_by_name(family: str) -> None:
    model, tokens = tiny_model(family)[1], tiny_tokens(2, 40)
    names = list(inspect.signature(model.forward).parameters)
    expected = model(tokens).logits[:, -2:]
    with patched(model) as patch:
        cache, other = (
            model(tokens[:, :-2], use_cache=True, **options).cache for options in ({}, patch.encoding("none"))
        )
        before = [None] * (names.index("cache") - 1)
        assert relative(model(tokens[:, -2:], *before, cache).logits, expected) < TOLERANCE
        result = model(tokens[:, -2:], *before, other, **patch.encoding("none")).logits
        assert relative(result, model(tokens, **patch.encoding("none")).logits[:, -2:]) < TOLERANCE
        mask = torch.ones(2, 40)
        mask[0, :9] = 0
        before = [None] * (names.index("attention_mask") - 1)
        padded = model(tokens, *before, mask).logits[0, 9:]
        assert relative(padded, model(tokens[:1, 9:]).logits[0]) < TOLERANCE
        with pytest.raises(TypeError, match="multiple values for argument 'input_ids'"):
            model(tokens, input_ids=tokens)
        with pytest.raises(TypeError, match="arguments without a name"):
            model(tokens, *[None] * 40)
        with pytest.raises(ValueError, match="input_ids: give token ids, or inputs_embeds"):
            model()


@torch.no_grad()
def test_methods_that_others_wrapped_take_arguments_in_their_places() -> None:
    model, tokens = tiny_model("llama")[1], tiny_tokens(1, 40)
    forward, generate = model.forward, model.generate
    model.forward, model.generate = lambda *args, **kw: forward(*args, **kw), lambda *args, **kw: generate(*args, **kw)
    with patched(model) as patch:
        yarn = patch.encoding("yarn:4")
        assert torch.equal(model(tokens, **yarn).logits, model(input_ids=tokens, **yarn).logits)
        options: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False}
        assert torch.equal(model.generate(tokens, **options, **yarn), model.generate(inputs=tokens, **options, **yarn))
        with pytest.raises(ValueError, match="guidance_scale"):
            model.generate(tokens, GenerationConfig(guidance_scale=3.0, max_new_tokens=2), **yarn)
