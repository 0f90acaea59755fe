"""Projections of one input as one product. No kernel is needed for it."""

from __future__ import annotations

import torch
from torch import nn

from patches.model.fusion.active import fusing
from patches.model.fusion.projections import Joined, are_ordinary, joined_forwards
from tests.models import tiny_model


def linear(outputs: int, *, bias: bool = False) -> nn.Linear:
    return nn.Linear(8, outputs, bias=bias)


def test_every_attention_and_every_gate_has_one_product() -> None:
    model = tiny_model("llama")[1]
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    found = list(joined_forwards(model))
    assert sorted(len(forwards) for _, forwards in found) == sorted([2, 3] * model.config.num_hidden_layers)
    x = torch.randn(1, 3, model.config.hidden_size)
    for joined, forwards in found:
        memory = {module.weight.untyped_storage().data_ptr() for module, _ in forwards}
        assert memory == {joined.weight.untyped_storage().data_ptr()}
        for module, fused in forwards:
            with torch.no_grad(), fusing(True):
                assert torch.allclose(fused(x), module(x), atol=1e-6)
            assert torch.equal(fused(x), module(x)), "elsewhere it is its own product"
        joined.separate()
        assert len({module.weight.untyped_storage().data_ptr() for module, _ in forwards}) == len(forwards)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_a_product_serves_its_own_input_only() -> None:
    layers = [linear(4, bias=True), linear(2, bias=True), linear(2, bias=True)]
    joined, (one, other) = Joined(layers), torch.randn(2, 1, 3, 8)
    with torch.no_grad():
        for x in (one, other):
            assert torch.allclose(joined.part(0, x), layers[0](x), atol=1e-6)
        for x in (one, other, other, one):
            for number in (2, 1, 2):
                assert torch.allclose(joined.part(number, x), layers[number](x), atol=1e-6)


def test_changed_numbers_are_seen() -> None:
    layers = [linear(4, bias=True), linear(2, bias=True), linear(2, bias=True)]
    joined, x = Joined(layers), torch.randn(1, 3, 8)
    with torch.no_grad():
        for layer in layers:
            layer.weight.add_(1)
            layer.bias.add_(1)
        assert torch.allclose(joined.part(0, x), layers[0](x), atol=1e-5)
        assert joined.is_current
        layers[1].bias.data = torch.ones(2)
    assert not joined.is_current


def test_layers_that_share_memory_are_not_joined() -> None:
    """An adapter's model has other parameters over the memory of its base."""
    layers = [linear(4), linear(2), linear(2)]
    copies = [linear(4), linear(2), linear(2)]
    for layer, copied in zip(layers, copies, strict=True):
        copied.weight = nn.Parameter(layer.weight.detach(), requires_grad=False)
    assert not are_ordinary(layers)
    assert not are_ordinary(copies)
    del copies, copied
    assert are_ordinary(layers)


def test_other_layers_stay_as_they_are() -> None:
    class Other(nn.Linear):
        pass

    hooked = linear(4)
    hooked.register_forward_hook(lambda *_: None)
    assert are_ordinary([linear(4), linear(2), linear(2)])
    for odd in (None, Other(8, 2), linear(2, bias=True), nn.Linear(6, 2, bias=False), linear(2).bfloat16(), hooked):
        assert not are_ordinary([linear(4), linear(2), odd])
