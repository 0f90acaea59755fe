"""A model whose attention does more than ours is refused in every number format, beside rounding of any size."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from patches import UnsupportedModel, patched
from patches.model.measuring import half_precision
from tests.field import configurations
from tests.models import tiny_tokens
from tests.patches.model.test_patched import logits_of_unpatched, native_model, same, state_of

AMPLIFIES = "dots3_note_text"
"""Its indexer chooses other keys where states differ by a bit."""

DIFFERS = "its attention computes more than .* the patched logits differ by"


def amplifying() -> PreTrainedModel:
    """In bfloat16, two computations of it that differ in rounding alone differ by 0.5 of the largest logit."""
    return configurations.tiny_model(AMPLIFIES).bfloat16()


def doubled(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, only: torch.dtype | None = None) -> None:
    """Its own attention has twice the output, in the number format ``only`` if there is one."""
    attention = type(model.get_submodule("model.layers.0.self_attn"))
    original = attention.forward

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output, *others = original(self, hidden_states, *args, **kwargs)
        is_own = "ropeway" not in self.config._attn_implementation and only in (None, hidden_states.dtype)
        return output * (2.0 if is_own else 1.0), *others

    monkeypatch.setattr(attention, "forward", forward)


def refused(model: PreTrainedModel, match: str = DIFFERS) -> None:
    before = state_of(model)
    with pytest.raises(UnsupportedModel, match=match), patched(model):
        raise AssertionError("never entered")
    assert same(before, state_of(model))


def test_attention_with_a_term_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = native_model("default")
    doubled(monkeypatch, model)
    refused(model)


def test_amplified_rounding_is_carried_and_leaves_the_weights() -> None:
    model, tokens = amplifying(), tiny_tokens(1, 30)
    before, places = state_of(model), [weight.data_ptr() for weight in model.parameters()]
    expected = logits_of_unpatched(model, tokens)
    with patched(model):
        assert model.dtype == torch.bfloat16
    assert same(before, state_of(model))
    assert places == [weight.data_ptr() for weight in model.parameters()]
    assert torch.equal(logits_of_unpatched(model, tokens), expected)


def test_a_fault_beside_amplified_rounding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = amplifying()
    doubled(monkeypatch, model)
    refused(model)


def test_a_fault_in_half_precision_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own rounding is too small to explain the difference."""
    model = native_model("default").bfloat16()
    doubled(monkeypatch, model, only=torch.bfloat16)
    refused(model)


def test_a_lack_of_memory_for_the_comparison_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def full(_: Any) -> Any:
        raise torch.OutOfMemoryError
        yield

    monkeypatch.setattr(half_precision, "in_float32", full)
    refused(amplifying(), "the memory does not suffice for a comparison in float32")
