"""Limits of a patched model in ordinary transformers code: each refusal names the reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaModel, PreTrainedModel, T5Config, T5ForConditionalGeneration

from patches import Patched, UnsupportedModel, patched
from patches.model import encodings as kept
from tests.models import tiny_model, tiny_tokens


@pytest.mark.parametrize(("encodings", "length"), [(["yarn:4"], None), ("yarn:4", [50])])
def test_a_list_of_one_is_for_one_row(encodings: Any, length: Any, patch: Patched) -> None:
    chosen = patch.encoding(encodings, length=length)
    with pytest.raises(ValueError, match="position_encoding: 1 encodings for 2 rows; give one without a list"):
        patch.model(tiny_tokens(2, 9), **chosen)
    expected = patch.model(tiny_tokens(1, 9), **patch.encoding("yarn:4")).logits
    assert torch.equal(patch.model(tiny_tokens(1, 9), **chosen).logits, expected)


@pytest.mark.parametrize("length", [50, np.int64(50), torch.tensor(50), np.array(50)], ids=repr)
def test_a_length_is_any_integer(length: Any, patch: Patched) -> None:
    assert patch.encoding("dynamic:2", length=length) == patch.encoding("dynamic:2", length=50)


def test_only_the_encodings_used_last_are_kept(patch: Patched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "KEPT", 3)
    first, second, third = (patch.encoding(f"linear:{factor}") for factor in (2, 3, 4))
    patch.model(tiny_tokens(1, 4), **first)
    patch.encoding("linear:5")
    assert len(patch._resolved) == len(patch._number_of) == 3
    patch.model(tiny_tokens(1, 4), **first)
    patch.model(tiny_tokens(1, 4), **third)
    with pytest.raises(ValueError, match="no encoding of this patched model"):
        patch.model(tiny_tokens(1, 4), **second)
    assert patch.encoding("linear:3") != second


@pytest.mark.parametrize("encoding", ["learned", "learned_interpolation:factor=4"])
def test_a_text_past_a_learned_table_is_refused(encoding: str) -> None:
    with patched(tiny_model("gpt2")[1]) as patch, pytest.raises(ValueError, match="table has 64 positions"):
        patch.model(tiny_tokens(1, 300), **patch.encoding(encoding))


def test_another_attention_inside_the_patch_is_refused() -> None:
    model = tiny_model("llama", attn_implementation="sdpa")[1]
    with patched(model) as patch:
        model.set_attn_implementation("sdpa")
        with pytest.raises(RuntimeError, match="call set_attn_implementation outside of it"):
            model(tiny_tokens(1, 9), **patch.encoding("self_extend"))


def test_weights_of_the_attention_are_refused(patch: Patched) -> None:
    with pytest.raises(ValueError, match="output_attentions: a patched model returns no weights"):
        patch.model(tiny_tokens(1, 9), output_attentions=True)


def test_other_classes_are_refused_with_the_reason(llama: PreTrainedModel) -> None:
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(UnsupportedModel, match="has an encoder and a decoder"), patched(t5):
        pass
    without_a_head = LlamaModel(llama.config)
    with pytest.raises(UnsupportedModel, match="returns no logits: load it with AutoModel"), patched(without_a_head):
        pass
