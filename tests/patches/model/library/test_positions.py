"""Positions behind cached tokens: bands and masks go by their distance, so they follow one by one."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from patches import Patched, patched
from tests.models import tiny_model

IDS = torch.arange(3, 63)[None]


@pytest.fixture(scope="module")
def patch() -> Patched:
    with patched(tiny_model("llama")[1]) as patch:
        yield patch


def at(first: int, count: int = 10) -> torch.Tensor:
    return torch.arange(first, first + count)[None]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("encoding", "first", "count"),
    [
        *((encoding, *at) for encoding in ("default", "self_extend", "alibi") for at in ((0, 10), (20, 10), (49, 1))),
        *((encoding, *at) for encoding in ("self_extend", "alibi") for at in ((51, 10), (200, 10), (51, 1))),
    ],
)
def test_positions_that_repeat_or_skip_behind_a_cache_are_refused(
    encoding: str, first: int, count: int, masked: bool, patch: Patched
) -> None:
    """Plain attention takes a gap."""
    cache, chosen = DynamicCache(config=patch.model.config), patch.encoding(encoding)
    patch.model(IDS[:, :50], past_key_values=cache, **chosen)
    mask = {"attention_mask": torch.ones(1, 50 + count)} if masked else {}
    with pytest.raises(ValueError, match=rf"count up by one behind cached tokens: the next is 50.* was {first}$"):
        patch.model(IDS[:, :count], past_key_values=cache, position_ids=at(first, count), **mask, **chosen)
    assert [layer.keys.shape[-2] for layer in cache.layers] == [50] * len(cache.layers), "it is as it was"


@pytest.mark.parametrize(("first", "count"), [(51, 10), (200, 10), (51, 1)])
@pytest.mark.parametrize("encoding", ["default", "yarn:4"])
def test_plain_attention_takes_a_gap(encoding: str, first: int, count: int, patch: Patched) -> None:
    """As in transformers, which masks by columns."""
    chosen, found = patch.encoding(encoding), []
    for shift in (0, 30):  # rotary attention depends on differences alone
        cache = DynamicCache(config=patch.model.config)
        patch.model(IDS[:, :50], past_key_values=cache, position_ids=at(shift, 50), **chosen)
        moved = at(first + shift, count)
        found.append(patch.model(IDS[:, :count], past_key_values=cache, position_ids=moved, **chosen).logits)
    assert torch.allclose(*found, atol=1e-4)


@pytest.mark.parametrize("encoding", ["alibi", "self_extend"])
def test_a_text_may_begin_anywhere_and_be_cropped(encoding: str, patch: Patched) -> None:
    chosen = patch.encoding(encoding)
    whole = patch.model(IDS, position_ids=at(30, 60), **chosen).logits[:, 50:]
    cache = DynamicCache(config=patch.model.config)
    patch.model(IDS[:, :55], past_key_values=cache, position_ids=at(30, 55), **chosen)
    cache.crop(-5)
    found = patch.model(IDS[:, 50:], past_key_values=cache, position_ids=at(80), **chosen).logits
    assert torch.allclose(found, whole, atol=1e-4)
    with pytest.raises(ValueError, match="behind cached tokens"):
        patch.model(IDS[:, :10], past_key_values=cache, position_ids=at(60), **chosen)


def test_an_emptied_cache_takes_any_position(patch: Patched) -> None:
    cache = DynamicCache(config=patch.model.config)
    expected = patch.model(IDS, position_ids=at(7, 60)).logits
    patch.model(IDS, past_key_values=cache)
    cache.crop(-60)
    assert cache.get_seq_length() == 0
    assert torch.allclose(patch.model(IDS, past_key_values=cache, position_ids=at(7, 60)).logits, expected, atol=1e-4)


def test_a_cache_from_elsewhere_has_as_many_positions_as_keys_at_least(patch: Patched) -> None:
    cache = DynamicCache(config=patch.model.config)
    patch.model(IDS[:, :50], past_key_values=cache)
    elsewhere = DynamicCache([(layer.keys, layer.values) for layer in cache.layers])
    with pytest.raises(ValueError, match="behind cached tokens"):
        patch.model(IDS[:, :10], past_key_values=elsewhere, position_ids=at(40))
    assert patch.model(IDS[:, 50:], past_key_values=elsewhere, position_ids=at(50)).logits.isfinite().all()
