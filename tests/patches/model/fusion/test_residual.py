"""Sums of layers and the norms that read them. Here, torch computes them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from patches.model.fusion import launch
from patches.model.fusion.active import fusing
from patches.model.fusion.detection import norm_of
from patches.model.fusion.forms import Norm
from patches.model.fusion.replacement import fused_forwards, measured
from patches.model.fusion.residual import Layer, norms_of, summing, taken
from tests.models import tiny_model, tiny_tokens


@pytest.fixture(autouse=True)
def sums(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The sums that a kernel would have computed."""
    found: list[torch.Tensor] = []

    def added_norm(
        x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float, form: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found.append(x + added)
        return found[-1], form.computed(found[-1], weight, eps)

    monkeypatch.setattr(launch, "added_norm", added_norm)
    monkeypatch.setattr(launch, "rms_norm", lambda x, weight, eps, form: form.computed(x, weight, eps))
    monkeypatch.setattr(launch, "gated", lambda *_: None)
    return found


def layers_of(model: nn.Module) -> list[nn.Module]:
    return [layer for parent in model.modules() for layer in parent._modules.get("layers") or ()]  # type: ignore[union-attr]


def fuse(model: nn.Module) -> list[Layer]:
    summed = list(summing(model, measured(model, norm_of)))
    for module, forward in [*fused_forwards(model), *summed]:
        module.forward = forward
    return [forward for _, forward in summed]


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    output: torch.Tensor = model(input_ids=tiny_tokens(1, 9), use_cache=False).logits
    return output


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "deepseek_v3", "diffllama"])
def test_every_sum_has_the_bits_of_the_model(family: str, sums: list[torch.Tensor]) -> None:
    model = tiny_model(family)[1].bfloat16()
    plain = logits(model)
    layers = fuse(model)
    assert len(layers) == model.config.get_text_config().num_hidden_layers
    assert torch.equal(logits(model), plain)
    assert sums == []
    with fusing(True):
        assert torch.equal(logits(model), plain)
    assert len(sums) == 2 * len(layers)


def test_the_last_sum_goes_to_the_norm_of_the_model() -> None:
    model = tiny_model("llama")[1]
    layers = fuse(model)
    firsts = [layer.input_layernorm for layer in model.model.layers[1:]]
    assert [layer.following for layer in layers] == [*firsts, model.model.norm]


def test_an_output_is_given_once_and_to_its_norm_only() -> None:
    model = tiny_model("llama")[1]
    (layer, *_) = fuse(model)
    norm, x = model.model.norm, torch.ones(1, 2, 64)
    with torch.no_grad():
        total = layer._sum(x, x, norm)
        assert taken(model.model.layers[0].input_layernorm, total) is None
        total = layer._sum(x, x, norm)
        assert taken(norm, total.clone()) is None
        total = layer._sum(x, x, norm)
        normed = taken(norm, total)
        assert normed is not None
        assert torch.equal(normed, type(norm).forward(norm, total))
        assert taken(norm, total) is None


@pytest.mark.parametrize("family", ["granite", "olmo2", "gpt_oss", "gpt_neox", "cohere", "phi3", "llama4"])
def test_layers_that_compute_other_sums_stay(family: str) -> None:
    """A multiplier, norms behind only, other returns, parallel parts, dropouts, other norms."""
    assert {norms_of(layer) for layer in layers_of(tiny_model(family)[1])} == {None}


def changed(change: Callable[..., Any]) -> nn.Module:
    """A layer of Llama whose forward is ``change`` of the ordinary one."""
    layer: Any = copy.copy(layers_of(tiny_model("llama")[1])[0])
    ordinary = type(layer)

    class Changed(ordinary):  # type: ignore[misc,valid-type]
        def forward(self, hidden_states: torch.Tensor, **given: Any) -> Any:
            return change(super().forward, hidden_states, given)

    layer.__class__ = Changed
    return layer  # type: ignore[no-any-return]


def test_layers_are_compared_by_all_that_they_do() -> None:
    def same(forward: Any, x: torch.Tensor, given: dict[str, Any]) -> Any:
        return forward(x, **given)

    def scaled(forward: Any, x: torch.Tensor, given: dict[str, Any]) -> Any:
        return forward(x, **given) * 1.001

    def without_cache(forward: Any, x: torch.Tensor, given: dict[str, Any]) -> Any:
        return forward(x, **given | {"past_key_values": None})

    def as_tuple(forward: Any, x: torch.Tensor, given: dict[str, Any]) -> Any:
        return (forward(x, **given),)

    assert norms_of(changed(same)) is not None
    assert [norms_of(changed(change)) for change in (scaled, without_cache, as_tuple)] == [None] * 3


def test_hooks_see_the_outputs_of_norms() -> None:
    layer = layers_of(tiny_model("llama")[1])[0]
    assert norms_of(layer) is not None
    hook = layer.post_attention_layernorm.register_forward_hook(lambda *_: None)  # type: ignore[union-attr,operator]
    assert norms_of(layer) is None
    hook.remove()
    assert norms_of(layer) is not None


def test_models_without_a_norm_of_a_kernel_stay() -> None:
    model = tiny_model("olmo")[1]
    assert {norms_of(layer) for layer in layers_of(model)} != {None}
    assert fuse(model) == []


def test_tensors_that_do_not_fit_are_added_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")[1]
    plain = logits(model)
    assert fuse(model)
    monkeypatch.setattr(launch, "added_norm", lambda *_: None)
    with fusing(True):
        assert torch.equal(logits(model), plain)
