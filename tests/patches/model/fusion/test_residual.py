"""Sums of layers and the norms that read them. Here, torch computes them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
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
    norms = measured(model, norm_of)
    summed = list(summing(model, norms))
    for module, forward in [*fused_forwards(model, norms), *summed]:
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
        return forward(x, **given | {"cache": None})

    def as_tuple(forward: Any, x: torch.Tensor, given: dict[str, Any]) -> Any:
        return (forward(x, **given),)

    def clamped(forward: Any, x: torch.Tensor, given: dict[str, Any]) -> Any:
        out = forward(x, **given)
        return out.clamp(-65504, 65504) if out.dtype == torch.float16 else out

    assert norms_of(changed(same)) is not None
    assert [norms_of(changed(change)) for change in (scaled, without_cache, as_tuple, clamped)] == [None] * 4


@pytest.mark.parametrize("part", ["mlp", "input_layernorm", "post_attention_layernorm"])
def test_arguments_of_other_parts_are_seen(part: str) -> None:
    def with_more(forward: Any, x: torch.Tensor, given: dict[str, Any]) -> Any:
        modules = forward.__self__._modules
        modules[part] = partial(modules[part], scale=2.0)
        return forward(x, **given)

    assert norms_of(changed(with_more)) is None


def test_a_layer_that_unpacks_its_mlp_may_be_fused() -> None:
    """Experts give their choices beside their output."""

    class Pair(nn.Module):
        def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, None]:
            return 2 * states, None

    class Unpacking(nn.Module):
        def forward(self, hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:
            attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **given)
            hidden_states = hidden_states + attended
            output = self.mlp(self.post_attention_layernorm(hidden_states))
            return hidden_states + (output[0] if isinstance(output, tuple) else output)  # type: ignore[no-any-return]

    model = tiny_model("llama")[1]
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = unpacking = Unpacking()
        unpacking._modules = {**layer._modules, "mlp": Pair()}
        unpacking.eval()
    plain = logits(model)
    assert len(fuse(model)) == len(model.model.layers)
    with fusing(True):
        assert torch.equal(logits(model), plain)


def test_hooks_that_change_an_output_in_place_are_seen() -> None:
    model = tiny_model("llama")[1]
    assert fuse(model)
    model.model.layers[0].register_forward_hook(lambda module, args, output: output.add_(1.0))
    plain = logits(model)
    with fusing(True):
        assert torch.equal(logits(model), plain)


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
