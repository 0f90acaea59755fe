"""Limits of a patched model in ordinary transformers code: each refusal names the reason."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from patches import Patched, UnsupportedModel, patched
from patches.model import encodings as kept
from tests.models import tiny_model, tiny_tokens
from tests.patches.forward import relative


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


def test_weights_of_the_attention_are_refused(patch: Patched, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="output_attentions: a patched model returns no weights"):
        patch.model(tiny_tokens(1, 9), output_attentions=True)
    monkeypatch.setattr(patch.model.config, "_output_attentions", True)
    with pytest.raises(ValueError, match="output_attentions"):
        patch.model(tiny_tokens(1, 9))


def test_other_classes_are_refused_with_the_reason(llama: PreTrainedModel) -> None:
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(UnsupportedModel, match="has an encoder and a decoder"), patched(t5):
        pass
    without_a_head = LlamaModel(llama.config)
    with pytest.raises(UnsupportedModel, match="returns no logits: load it with AutoModel"), patched(without_a_head):
        pass
    pooled = LlamaForSequenceClassification(llama.config)
    with pytest.raises(UnsupportedModel, match="returns no logits of each token: load it with Auto"), patched(pooled):
        pass
    with pytest.raises(UnsupportedModel, match="its weights are on the device meta"), patched(llama_on("meta")):
        pass
    weights = tiny_model("llama", output_attentions=True, attn_implementation="eager")[1]
    with pytest.raises(UnsupportedModel, match="its configuration has output_attentions"), patched(weights):
        pass


def llama_on(device: str) -> PreTrainedModel:
    with torch.device(device):
        return LlamaForCausalLM(tiny_model("llama")[1].config)


def test_a_number_of_another_process_is_refused(patch: Patched, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of a data loader is a copy, whose numbers would go on like those of the original."""
    with monkeypatch.context() as worker:
        worker.setattr(kept.os, "getpid", lambda: 7)
        number = patch.encoding("linear:1.75")["position_encoding"]
        patch.model(tiny_tokens(1, 9), position_encoding=number)
    del patch._resolved[number], patch._number_of[patch.resolve("linear:1.75", 9), None]  # the original has them not
    with pytest.raises(ValueError, match=f"{number} was made in another process, such as a data loader's worker"):
        patch.model(tiny_tokens(1, 9), position_encoding=number)
    assert patch.encoding("linear:1.75")["position_encoding"] != number


def test_models_that_share_a_configuration(llama: PreTrainedModel) -> None:
    twin = LlamaForCausalLM(llama.config)
    with patched(llama) as patch:
        with pytest.raises(ValueError, match="the model is patched already"), patched(llama):
            pass
        with pytest.raises(ValueError, match="its configuration is that of a patched model"), patched(twin):
            pass
        with pytest.raises(RuntimeError, match="nor another with its configuration object"):
            twin(tiny_tokens(1, 9))
        with pytest.raises(TypeError, match="a patched model is not copied or pickled"):
            copy.deepcopy(llama)
        patch.model(tiny_tokens(1, 9))
    with patched(twin):
        twin(tiny_tokens(1, 9))
    twin(tiny_tokens(1, 9))


def test_threads_patch_a_model_one_at_a_time(llama: PreTrainedModel) -> None:
    refused = []

    def patch_it() -> None:
        try:
            with patched(llama):
                llama(tiny_tokens(1, 9))
        except ValueError as error:
            refused.append(str(error))

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(patch_it) for _ in range(16)]:
            done.result()
    assert set(refused) <= {"the model is patched already: one patch serves every encoding"}


@torch.no_grad()
def test_a_model_is_patched_under_another_default_format() -> None:
    model = tiny_model("llama")[1]
    torch.set_default_dtype(torch.float64)
    try:
        with patched(model) as patch:
            wide = model(tiny_tokens(1, 9), **patch.encoding("yarn:4")).logits
    finally:
        torch.set_default_dtype(torch.float32)
    with patched(model) as patch:
        assert relative(wide, model(tiny_tokens(1, 9), **patch.encoding("yarn:4")).logits) < 1e-6
