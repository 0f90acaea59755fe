"""Weights in 4 bits on a CPU, and their products by kernels of FBGEMM that torch has for tables of embeddings.

torchao's kernel has vectors for bfloat16 alone. In float32 and float16, it multiplies one row after the other, number
by number: 13M weights take 17 ms a row. FBGEMM: https://github.com/pytorch/FBGEMM, "FusedNBitRowwise".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from service.models.linear.fixed import FixedWeight
from service.models.linear.products import has_onednn, in_sizes

FEW = 8
"""Rows up to which sums of codes take less time than a product by numbers."""
BLOCK = 1 << 22
"""Bytes of a block's numbers in float32, at most: the processor's cache has room. ``LEAST`` outputs may take more."""
LEAST = 128
MIDDLE = 8
"""The code of a group's zero point."""


class Int4Weight(FixedWeight):
    """A weight [out_features, in_features] of ``codes`` with a scale and a zero point per output and group of inputs.

    A number is ``(code - MIDDLE) * scale + zero``. ``codes`` [blocks, in_features, bytes] are rows of FBGEMM's tables.
    A byte has the codes of two neighbouring outputs. A row ends with 1 and -``MIDDLE`` in float16: FBGEMM multiplies by
    one and adds the other. ``scale`` and ``zero`` [blocks, groups, width] have the weight's dtype.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> Int4Weight:
        shape = scale.shape[0] * scale.shape[2], codes.shape[1]
        made: Int4Weight = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=scale.dtype, device=codes.device)
        made.codes, made.scale, made.zero = codes, scale, zero
        return made

    def numbers(self, block: int) -> torch.Tensor:
        """Those of a block in float32 [in_features, width], each rounded once."""
        scale, zero = self.scale[block, :, None].float(), self.zero[block, :, None].float()
        groups, _, width = scale.shape
        values = torch.ops.quantized.embedding_bag_4bit_unpack(self.codes[block])
        return torch.addcmul(zero, values.view(groups, -1, width), scale).view(-1, width)

    def plain(self) -> torch.Tensor:
        return torch.cat([self.numbers(block).t() for block in range(len(self.codes))]).to(self.dtype)

    def again(self) -> Int4Weight:
        return Int4Weight(self.codes, self.scale, self.zero)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale", "zero"], None


def in_int4(weight: torch.Tensor, group: int) -> Int4Weight:
    """``weight`` in torchao's codes for groups of so many columns, which divide it. Its rows are an even number."""
    # Private in torchao 0.18. The tensors that it has for a CPU give back neither codes nor numbers.
    from torchao.quantization.quant_primitives import (
        MappingType,
        _choose_qparams_affine_tinygemm,
        _quantize_affine_tinygemm,
    )

    outputs, inputs = weight.shape
    block, integers = (1, group), (torch.int32, 0, 2 * MIDDLE - 1)
    scale, zero = _choose_qparams_affine_tinygemm(
        weight, MappingType.ASYMMETRIC, block, *integers, eps=1e-6, zero_point_dtype=weight.dtype
    )
    codes = _quantize_affine_tinygemm(weight, block, scale, zero, *integers).to(torch.uint8)
    width = _width(outputs, inputs)
    even, odd = codes.view(-1, width // 2, 2, inputs).permute(2, 0, 3, 1)
    factors = torch.tensor([1, -MIDDLE], dtype=torch.float16).view(torch.uint8).expand(*even.shape[:2], -1)
    by_group = (each.view(-1, width, inputs // group).transpose(1, 2).contiguous() for each in (scale, zero))
    return Int4Weight(torch.cat((even | odd << 4, factors), -1), *by_group)


def _width(outputs: int, inputs: int) -> int:
    """Outputs of a block: the most in ``BLOCK``, or ``LEAST``, by which ``outputs`` can be divided."""
    most = min(outputs, max(LEAST, BLOCK // (4 * inputs)))
    return next(width for width in range(most - most % 2, 0, -2) if outputs % width == 0)


def by_codes(linear: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """[..., out_features] by sums of the codes of each group, each code times its input.

    FBGEMM's kernel sums in float32 and reads the codes alone. The sums of a row are the same beside any others.
    """
    weight: Any = linear.weight
    blocks, groups, width = weight.scale.shape
    inputs, x = linear.in_features, input.reshape(-1, linear.in_features).float()
    shape = blocks, *x.shape
    places = torch.arange(blocks * inputs, dtype=torch.int32).view(blocks, 1, inputs).expand(shape).reshape(-1)
    starts = torch.arange(0, places.numel(), inputs // groups, dtype=torch.int32)
    table, factors = weight.codes.view(blocks * inputs, -1), x.expand(shape).reshape(-1)
    sums = torch.ops.quantized.embedding_bag_4bit_rowwise_offsets(table, places, starts, False, 0, False, factors)
    of_groups = x.view(-1, groups, inputs // groups).sum(2, keepdim=True)
    scaled = sums.view(blocks, -1, groups, width) * weight.scale[:, None]
    output = torch.addcmul(scaled, of_groups, weight.zero[:, None].float()).sum(2).transpose(0, 1)
    output = output.reshape(*input.shape[:-1], linear.out_features).to(input.dtype)
    return output if linear.bias is None else output + linear.bias


def by_blocks(linear: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """[..., out_features] by products with the numbers of one block after the other, in float32."""
    weight: Any = linear.weight
    x = input.float()
    outputs = [_product(x, weight.numbers(block)) for block in range(len(weight.codes))]
    output = (outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)).to(input.dtype)
    return output if linear.bias is None else output + linear.bias


def _product(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """[..., width] of x [..., in_features] and numbers [in_features, width]."""
    return in_sizes(x, numbers.t(), None, numbers.shape[1]) if has_onednn(x.dtype) else x @ numbers
