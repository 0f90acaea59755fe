"""Fused operations run in steps on the Triton kernel only, and leave nothing behind. Here, torch computes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from transformers.models.cohere import modeling_cohere
from transformers.models.llama import modeling_llama

from patches import PagedBatch, Patched, patched
from patches.model import hf
from patches.model.fusion import launch
from patches.model.fusion.active import fusing, is_fusing
from patches.model.fusion.forms import Activation, Norm, Rotation
from tests.models import tiny_model, tiny_tokens

ORDINARY = modeling_llama.apply_rotary_pos_emb


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Calls of each operation that would be kernels; models are patched as on a card."""
    calls: Counter[str] = Counter()

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, form: Norm) -> torch.Tensor:
        calls["norm"] += 1
        return form.computed(x, weight, eps)

    def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, form: Rotation) -> Any:
        calls["rotation"] += 1
        return form.computed(q, cos, sin, False), form.computed(k, cos, sin, False)

    def gated(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
        calls["gated"] += 1
        return activation.computed(gate) * up

    monkeypatch.setattr(hf, "runs_triton", lambda device: True)
    for function in (rms_norm, rotate, gated):
        monkeypatch.setattr(launch, function.__name__, function)
    yield calls
    assert modeling_llama.apply_rotary_pos_emb is ORDINARY


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    output: torch.Tensor = model(input_ids=tiny_tokens(1, 9), use_cache=False).logits
    return output


def test_a_step_fuses_every_operation(fused: Counter[str]) -> None:
    model = tiny_model("llama")[1]
    with patched(model):
        plain = logits(model)
        assert fused == {}
        with fusing(True):
            # The model's own forward: the patched one decides by its batch.
            assert torch.equal(logits(model), plain)
            assert fused == {}
            norm, mlp = model.model.norm, model.model.layers[0].mlp
            x = torch.ones(1, 3, 64)
            with torch.no_grad():
                assert torch.equal(norm(x), type(norm).forward(norm, x))
                assert torch.equal(mlp(x), type(mlp).forward(mlp, x))
            assert fused == {"norm": 1, "gated": 1}


def test_the_batch_of_a_forward_decides(fused: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own forward notes whether operations are fused, and computes nothing."""
    seen: list[bool] = []

    def own(**_: Any) -> None:
        seen.append(is_fusing())

    def forward(patch: Patched, backend: Any) -> None:
        batch = PagedBatch([], packed=True, steps=[], backend=backend)
        with patch.packed(batch, {}):
            patch.run(own, input_ids=tiny_tokens(1, 5), position_ids=torch.arange(5)[None])

    model = tiny_model("llama")[1]
    with patched(model) as patch, torch.no_grad():
        monkeypatch.setattr(PagedBatch, "is_static", False)
        forward(patch, "triton")
        forward(patch, "eager")
        patch.run(own, input_ids=tiny_tokens(1, 5))
        with torch.enable_grad():
            forward(patch, "triton")
        model.train()
        forward(patch, "triton")
    assert seen == [True, False, False, False, False]
    assert not is_fusing()


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_other_forwards_have_the_bits_of_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family)[1]
    with patched(model):
        with_fusion = logits(model)
    monkeypatch.setattr(hf, "runs_triton", lambda device: False)
    with patched(model):
        assert torch.equal(logits(model), with_fusion)


def test_gradients_are_never_fused(fused: Counter[str]) -> None:
    model = tiny_model("llama")[1]
    with patched(model), fusing(True):
        model.model.norm(torch.ones(1, 3, 64)).sum().backward()
        assert model.model.norm.weight.grad is not None
        q, table = torch.ones(1, 2, 3, 8), torch.ones(1, 3, 8)
        modeling_llama.apply_rotary_pos_emb(q, q, table, table)
    assert fused == {}


def test_a_rotation_with_other_arguments_is_the_models_own(fused: Counter[str]) -> None:
    q, table = torch.ones(1, 2, 3, 8), torch.ones(1, 3, 8)
    with patched(tiny_model("llama")[1]), torch.no_grad(), fusing(True):
        rotate = modeling_llama.apply_rotary_pos_emb
        rotate(q, q, table, table)
        rotate(q, q, table, table, unsqueeze_dim=1)
        assert fused == {"rotation": 2}
        rotate(q.mT.mT.expand(2, -1, -1, -1), q.expand(2, -1, -1, -1), table, table)
        rotate(q.transpose(1, 2), q.transpose(1, 2), table, table, unsqueeze_dim=2)
        rotate(q.double(), q.double(), table, table)
        assert fused == {"rotation": 2}


def test_a_rotation_in_no_form_stays() -> None:
    ordinary = modeling_cohere.apply_rotary_pos_emb
    with patched(tiny_model("cohere")[1]):
        assert modeling_cohere.apply_rotary_pos_emb is ordinary
    assert modeling_cohere.apply_rotary_pos_emb is ordinary


def test_two_models_share_a_rotation() -> None:
    first, second = ExitStack(), ExitStack()
    first.enter_context(patched(tiny_model("llama")[1]))
    shared = modeling_llama.apply_rotary_pos_emb
    assert shared is not ORDINARY
    second.enter_context(patched(tiny_model("llama", seed=1)[1]))
    assert modeling_llama.apply_rotary_pos_emb is shared
    first.close()
    assert modeling_llama.apply_rotary_pos_emb is shared
    second.close()
    assert modeling_llama.apply_rotary_pos_emb is ORDINARY


def test_everything_is_undone_after_an_exception() -> None:
    model = tiny_model("llama")[1]

    def fails() -> None:
        with patched(model):
            assert "forward" in vars(model.model.norm)
            raise KeyError("x")

    with pytest.raises(KeyError):
        fails()
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_rotation_that_somebody_replaced_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(*args: Any) -> Any:
        return ORDINARY(*args)

    with patched(tiny_model("llama")[1]):
        modeling_llama.apply_rotary_pos_emb = theirs
    assert modeling_llama.apply_rotary_pos_emb is theirs
    modeling_llama.apply_rotary_pos_emb = ORDINARY


def test_the_switch_is_the_threads_own_and_nests() -> None:
    with torch.no_grad(), fusing(True):
        with fusing(False):
            assert not is_fusing()
        assert is_fusing()
        with torch.enable_grad():
            assert not is_fusing()
    assert not is_fusing()
