"""Weights in 4 bits on a CPU: torchao's numbers, products for each number of rows, and the memory of a call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from service.models.checkpoint.quantization import quantize
from service.models.linear.int4 import BLOCK, FEW, LEAST, Int4Weight, by_blocks, by_codes, in_int4
from service.models.linear.layers import UNBOUNDED, ChosenLinear
from service.models.memory.weights import parts, places
from tests.models import tiny_model, tiny_tokens

torchao = pytest.importorskip("torchao.prototype.quantization.int4")

DTYPES = [torch.float32, torch.float16]
ROUNDING = {torch.float32: 2e-6, torch.float16: 2e-3}
SHAPES = [(2304, 512, 128), (192, 192, 64), (16, 32, 32)]
"""Outputs, inputs and columns of a group, in two blocks, one and one."""


def layer(outputs: int, inputs: int, group: int, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs, dtype=dtype).requires_grad_(False)
    linear.weight = nn.Parameter(in_int4(linear.weight.detach(), group), requires_grad=False)
    return linear


class Sizes(TorchDispatchMode):
    """Within it, ``most`` is the number of bytes of the largest output of an operation."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            self.most = max(self.most, output.nbytes)
        return output


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs", "group"), SHAPES)
def test_its_numbers_are_those_of_torchao(outputs: int, inputs: int, group: int, dtype: torch.dtype) -> None:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = in_int4(weight, group)
    theirs = F.linear(torch.eye(inputs, dtype=dtype), torchao.Int4OpaqueTensor.from_hp(weight, [1, group]))
    assert (found.shape, found.dtype, found.device) == (weight.shape, dtype, weight.device)
    assert torch.equal(found.plain(), theirs.t())
    assert torch.equal(found[3:7], theirs.t()[3:7])


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, FEW, FEW + 1, 600])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs", "group"), SHAPES)
def test_products_are_those_of_its_numbers(
    outputs: int, inputs: int, group: int, dtype: torch.dtype, rows: int
) -> None:
    linear = layer(outputs, inputs, group, dtype)
    x = torch.randn(rows, 1, inputs).to(dtype)
    expected = F.linear(x.double(), linear.weight.plain().double(), linear.bias.double())
    for product in [by_blocks, *([by_codes] if rows <= FEW else [])]:
        found = product(linear, x)
        assert (found.shape, found.dtype) == ((rows, 1, outputs), dtype)
        assert float((found - expected).abs().max()) < ROUNDING[dtype] * float(expected.abs().max())


@torch.no_grad()
def test_few_rows_have_the_same_bits_in_any_company() -> None:
    linear = layer(2304, 512, 128)
    x = torch.randn(FEW, 512)
    together = by_codes(linear, x)
    assert all(torch.equal(by_codes(linear, x[None, row : row + 1])[0], together[row : row + 1]) for row in range(FEW))


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, FEW + 1])
@pytest.mark.parametrize(("outputs", "inputs", "block"), [(4096, 512, BLOCK), (256, 16384, 4 * LEAST * 16384)])
def test_a_call_has_the_numbers_of_a_block_at_a_time(outputs: int, inputs: int, block: int, rows: int) -> None:
    linear = ChosenLinear(layer(outputs, inputs, 128), ((FEW, by_codes), (UNBOUNDED, by_blocks)))
    with Sizes() as sizes:
        linear(torch.ones(rows, inputs))
    assert sizes.most <= block < 4 * linear.weight.numel()


def test_it_is_its_codes_and_nobody_writes_into_it() -> None:
    weight = layer(192, 192, 64).weight
    assert isinstance(weight, Int4Weight)
    codes, scale, zero = parts(weight)
    assert [tuple(each.shape) for each in (codes, scale, zero)] == [(1, 192, 100), (1, 3, 192), (1, 3, 192)]
    assert copy.deepcopy(weight).codes.data_ptr() == weight.detach().codes.data_ptr() == codes.data_ptr()
    with pytest.raises(TypeError, match="a weight in this layout is fixed"):
        weight.mul_(2)


@torch.no_grad()
def test_layers_of_a_model_choose_by_rows() -> None:
    """In bfloat16, torchao's own kernel is the faster one for few rows. Its layers stay ordinary."""
    models = {dtype: tiny_model("llama")[1].to(dtype) for dtype in (torch.float32, torch.bfloat16)}
    for model in models.values():
        assert quantize(model, "int4", torch.device("cpu")).layers == {"int4": 14}
    own = [module for module in models[torch.float32].modules() if isinstance(module, ChosenLinear)]
    assert [module.choice for module in own] == [((FEW, by_codes), (UNBOUNDED, by_blocks))] * 14
    assert {parts(module.weight)[0].data_ptr() for module in own} <= places(models[torch.float32]).keys()
    assert not any(isinstance(module, ChosenLinear) for module in models[torch.bfloat16].modules())


@torch.no_grad()
def test_a_prompt_at_once_in_chunks_and_by_tokens_differs_by_rounding() -> None:
    model = tiny_model("llama")[1]
    quantize(model, "int4", torch.device("cpu"))
    tokens = tiny_tokens(1, 24)
    at_once = model(tokens).logits
    for size in (10, 4, 1):
        cache, found = None, []
        for chunk in tokens.split(size, dim=1):
            output = model(chunk, cache=cache, use_cache=True)
            cache = output.cache
            found.append(output.logits)
        assert float((torch.cat(found, 1) - at_once).abs().max()) < 1e-5 * float(at_once.abs().max())


def test_gradients_reach_the_input() -> None:
    linear = layer(192, 192, 64)
    x = torch.randn(3, 192, requires_grad=True)
    ChosenLinear(linear, ((UNBOUNDED, by_codes),))(x).sum().backward()
    torch.testing.assert_close(x.grad, linear.weight.plain().sum(0).expand(3, -1))
