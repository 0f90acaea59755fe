"""Weights in the layout of oneDNN's products alone. A CPU otherwise brings them into it in every call.

oneDNN: https://uxlfoundation.github.io/oneDNN/dev_guide_matmul.html, section "memory formats". The compiler of torch
itself freezes weights by the same operator.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import nn

from service.models.linear.fixed import FixedWeight
from service.models.linear.products import has_onednn, in_sizes

ROWS = 16
"""Rows for which oneDNN makes the layout. Made for 8 to 512 rows, it is the same. Made for one row, it is none."""
WIDTHS = 64, 48, 32, 24, 16, 8
"""Outputs that a block of oneDNN's layouts may have, by the width of the processor's registers."""
MOST_PADDING = 1 / 16
"""Zeros of a layout, as a part of the weight's numbers, above which a weight stays plain."""
PROBED = 4096
"""Outputs of the weight by which a layout is found, at most. A vocabulary takes gigabytes."""
INTEGERS = {2: torch.int16, 4: torch.int32}
"""Integers by the size of a number in bytes, to compare bits."""


class PackedWeight(FixedWeight):
    """A weight [out_features, in_features] of a linear layer whose memory is ``packed``, oneDNN's tensor.

    ``blocks`` [groups, in_features / pair, width, pair] is a view of that memory. Two inputs of a half precision make a
    pair.
    """

    packed: torch.Tensor
    blocks: torch.Tensor

    @staticmethod
    def __new__(cls, shape: torch.Size, packed: torch.Tensor, blocks: torch.Tensor) -> PackedWeight:
        made: PackedWeight = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=blocks.dtype, device=blocks.device)
        made.packed, made.blocks = packed, blocks
        return made

    def plain(self) -> torch.Tensor:
        return _by_rows(self.blocks, len(self))

    def again(self) -> PackedWeight:
        return PackedWeight(self.shape, self.packed, self.blocks)

    def span(self) -> tuple[int, int]:
        """(address, bytes) of the memory."""
        return self.blocks.data_ptr(), self.blocks.nbytes

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["blocks"], None


def pack(weight: torch.Tensor) -> PackedWeight | None:
    """``weight`` in oneDNN's layout; None if it has a layout with many zeros, or one that is unknown here."""
    outputs, inputs = weight.shape
    width = width_of(weight)
    if width is None:
        return None
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
    groups = -(-outputs // width)
    if torch.ops.mkldnn._nbytes(packed) != groups * width * inputs * weight.itemsize:
        return None
    blocks = _blocks(packed, weight, width)
    for group in (0, groups // 2, groups - 1):  # a layout depends on the shape; these are seen again nevertheless
        first = group * width
        if not _is_same(_by_rows(blocks[group][None], outputs - first), weight[first : first + width]):
            return None
    _bags(*blocks.shape[:2])  # a recorded step must not make it
    return PackedWeight(weight.shape, packed, blocks)


def width_of(weight: torch.Tensor) -> int | None:
    """Outputs of a block in the layout of ``weight``; None if it cannot be packed."""
    outputs, inputs = weight.shape
    width = _width(min(outputs, PROBED), inputs, weight.dtype) if has_onednn(weight.dtype) else None
    return None if width is None or -outputs % width > MOST_PADDING * outputs else width


@cache
def _width(outputs: int, inputs: int, dtype: torch.dtype) -> int | None:
    """The width of such a weight, found by one whose numbers all differ."""
    if inputs * dtype.itemsize % 4:
        return None
    numbers = torch.arange(outputs * inputs * dtype.itemsize // 4, dtype=torch.int32).view(dtype)
    weight = numbers.view(outputs, inputs)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
    for width in WIDTHS:
        fits = torch.ops.mkldnn._nbytes(packed) == -(-outputs // width) * width * inputs * dtype.itemsize
        if fits and _is_same(_by_rows(_blocks(packed, weight, width), outputs), weight):
            return width
    return None


def _blocks(packed: torch.Tensor, weight: torch.Tensor, width: int) -> torch.Tensor:
    """A view of the memory of ``packed``, which lives as long as the view."""
    memory = (ctypes.c_char * torch.ops.mkldnn._nbytes(packed)).from_address(torch.ops.mkldnn.data_ptr(packed))
    memory.packed = packed
    pair = 4 // weight.itemsize
    return torch.frombuffer(memory, dtype=weight.dtype).view(-1, weight.shape[1] // pair, width, pair)


def _by_rows(blocks: torch.Tensor, outputs: int) -> torch.Tensor:
    """A weight [outputs, in_features] from its blocks, without their zeros."""
    groups, _, width, _ = blocks.shape
    return blocks.permute(0, 2, 1, 3).reshape(groups * width, -1)[:outputs].contiguous()


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True for equal bits."""
    integers = INTEGERS[one.itemsize]
    return torch.equal(one.view(integers), other.view(integers))


def by_packed(linear: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """oneDNN's product by a packed weight."""
    weight: Any = linear.weight
    return in_sizes(input, weight.packed, linear.bias, linear.out_features)


def by_sums(linear: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """[..., out_features] of one row: sums over the columns of a packed weight of float32, each times its input.

    ``torch.embedding_bag`` has FBGEMM's kernel for them. It reads each block from its beginning to its end.
    """
    weight: Any = linear.weight
    groups, inputs, width, _ = weight.blocks.shape
    factors = input.reshape(1, inputs).expand(groups, inputs).reshape(-1)
    output = torch.embedding_bag(weight.blocks.view(-1, width), *_bags(groups, inputs), False, 0, False, factors)[0]
    output = output.view(-1)[: linear.out_features].view(*input.shape[:-1], -1)
    return output if linear.bias is None else output + linear.bias


@cache
def _bags(groups: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of all columns of all blocks, and the first index of each block."""
    with torch.inference_mode(False), torch._C.DisableTorchFunction():
        columns = groups * inputs
        return torch.arange(columns, dtype=torch.int32), torch.arange(0, columns, inputs, dtype=torch.int32)


def has_packed_weights(model: nn.Module) -> bool:
    """True if some linear layer's weight has no plain copy."""
    return any(isinstance(weight, PackedWeight) for weight in model.parameters())
