"""Products by a layer's weight: each gives the layer's numbers, for any number of rows and any strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from service.models.linear.products import (
    SIZES,
    Product,
    by_columns,
    by_groups,
    by_onednn,
    has_onednn,
    plain,
    products_by,
)


def layer(bias: bool = False, **options: Any) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(512, 192, bias=bias, **options).requires_grad_(False)


@pytest.fixture(params=[by_onednn, by_columns, by_groups], ids=lambda product: product.__name__)
def product(request: pytest.FixtureRequest) -> Product:
    if request.param not in products_by(layer()):
        pytest.skip("this torch has no such library")
    return request.param  # type: ignore[no-any-return]


def close(found: torch.Tensor, linear: nn.Linear, x: torch.Tensor) -> None:
    expected = x.double() @ linear.weight.double().T + (0.0 if linear.bias is None else linear.bias.double())
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=6e-6)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 512), (2, 512), (1, 4, 512), (2, 31, 512), (300, 512)], ids=str)
def test_outputs_are_those_of_the_weight(product: Product, shape: tuple[int, ...], bias: bool) -> None:
    linear, x = layer(bias), torch.randn(shape)
    close(product(linear, x), linear, x)


def test_few_kernels_serve_every_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN keeps a kernel for each number of rows: thousands of them took gigabytes."""
    sizes: set[int] = set()
    multiplied = torch.ops.mkldnn._linear_pointwise

    def counted(x: torch.Tensor, *others: Any) -> torch.Tensor:
        sizes.add(len(x))
        output: torch.Tensor = multiplied(x, *others)
        return output

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", counted)
    linear = layer(bias=True)
    for rows in (*range(1, 130), 200, 300, 511, 512, 513, 1000, 1500):
        x = torch.randn(rows, 512)
        close(by_onednn(linear, x), linear, x)
    assert sizes == set(SIZES)


@pytest.mark.parametrize("rows", [1, 4, 17, 100])
def test_products_in_bfloat16(product: Product, rows: int) -> None:
    linear, x = layer(dtype=torch.bfloat16), torch.randn(rows, 512).bfloat16()
    if product not in products_by(linear):
        pytest.skip("this processor has no such product")
    found, expected = product(linear, x), x.double() @ linear.weight.double().T
    assert found.dtype == torch.bfloat16
    assert (found - expected).abs().max() < 4 * torch.finfo(torch.bfloat16).eps * expected.abs().max()


def test_inputs_need_not_be_contiguous(product: Product) -> None:
    linear = layer()
    for x in (torch.randn(1, 1024)[:, ::2], torch.randn(512, 7).T, torch.randn(3, 512)[:1].expand(4, 512)):
        close(product(linear, x), linear, x)
        assert product(linear, x).is_contiguous()


def test_layers_with_products() -> None:
    assert products_by(layer())[0] is plain
    assert by_groups not in products_by(nn.Linear(512, 200)), "200 rows are no groups of 64"
    others = nn.Linear(64, 64), layer(dtype=torch.float16), layer(device="meta")
    assert [products_by(each) for each in others] == [(plain,)] * 3, "small, in another format, elsewhere"
    sliced = nn.Linear(512, 192)
    sliced.weight = nn.Parameter(torch.randn(192, 1024)[:, ::2])
    assert products_by(sliced) == (plain,)


def test_without_its_library_a_product_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert by_onednn not in products_by(layer())
    assert not has_onednn(torch.float32)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert products_by(layer()) == (plain,)
