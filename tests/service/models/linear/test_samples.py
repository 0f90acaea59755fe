"""Layers on which products are timed: how much of a model, and in which memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from service.models.linear import samples
from service.models.linear.packing import PackedWeight, by_packed
from service.models.linear.products import has_onednn, plain
from service.models.linear.samples import Sample

pytestmark = pytest.mark.skipif(not has_onednn(torch.float32), reason="this torch has no oneDNN")


def layer(out_features: int = 192) -> nn.Linear:
    return nn.Linear(512, out_features, bias=False).requires_grad_(False)


def test_a_part_of_the_weights_is_timed() -> None:
    """Bytes bound it: more rows take longer, and a vocabulary takes seconds."""
    linears = [layer()] * 3
    size = linears[0].weight.nbytes
    for bytes_, expected in ((3 * size, [192] * 3), (2 * size, [192, 192]), (size // 2, [64]), (1, [64])):
        sample = Sample(linears, bytes_)
        assert [linear.out_features for linear in sample.plain] == expected
        for linear in (*sample.plain, *sample.packed):
            assert torch.equal(linear.weight.clone(), linears[0].weight[: linear.out_features])


def test_plain_weights_are_copies_and_packed_ones_beside_them() -> None:
    linear = layer()
    sample = Sample([linear])
    assert sample.plain[0].weight.data_ptr() not in (0, linear.weight.data_ptr())
    assert isinstance(sample.packed[0].weight, PackedWeight)
    assert not Sample([linear, layer(100)]).packed, "100 outputs would be 128"


def test_times_are_those_of_each_product_by_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "least_times", lambda runs: [run() or index for index, run in enumerate(runs)])
    seen = []

    def noted(linear: nn.Linear, input: torch.Tensor) -> torch.Tensor:
        seen.append((isinstance(linear.weight, PackedWeight), input.shape, torch.is_grad_enabled()))
        return by_packed(linear, input) if isinstance(linear.weight, PackedWeight) else plain(linear, input)

    assert Sample([layer(), layer()]).times(3, [noted, plain], [noted]) == [0, 1, 2]
    assert seen == [(False, (3, 512), False)] * 2 + [(True, (3, 512), False)] * 2
