"""The forms of each operation that the kernels compute, in plain operations of torch: detection compares with these.

Forms differ in the places where half precision rounds, and in float32 by the numbers themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Number formats of the kernels."""


class Norm(Enum):
    """A root mean square norm in float32. The weight multiplies a rounded quotient or not, and may lack one."""

    ROUNDED_FIRST = "weight * quotient.to(dtype)"
    ROUNDED_LAST = "(weight * quotient).to(dtype)"
    ONE_MORE = "((1 + weight) * quotient).to(dtype)"

    def computed(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """[..., n] in the dtype of ``x``, for ``x`` [..., n] and ``weight`` [n]."""
        wide = x.float()
        quotient = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        if self is Norm.ROUNDED_FIRST:
            return weight * quotient.to(x.dtype)
        factor = weight.float() + 1.0 if self is Norm.ONE_MORE else weight.float()
        return (factor * quotient).to(x.dtype)


class Activation(Enum):
    """The function of the gate in a gated product."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"

    def computed(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x) if self is Activation.SILU else F.gelu(x, approximate="tanh")


@dataclass(frozen=True)
class Layout:
    """Inputs of a rotation: dtypes of states and tables, and whether tables have one number per pair or per column."""

    states: torch.dtype
    tables: torch.dtype
    by_pair: bool


class Rotation(Enum):
    """Halves of each head turn: every product rounds to the dtype of the states, or only the sum does."""

    ROUNDED_PRODUCTS = "(x * cos).to(dtype) + (turned * sin).to(dtype)"
    ROUNDED_SUM = "(x * cos + turned * sin).to(dtype)"

    def computed(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, by_pair: bool) -> torch.Tensor:
        """Like ``x`` [1, heads, tokens, dim]. Tables are [1, tokens, dim], or half as wide ``by_pair``."""
        if by_pair:
            cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        first, second = x.chunk(2, -1)
        turned, wide = torch.cat((-second, first), -1).float(), x.float()
        products = wide * cos[:, None].float(), turned * sin[:, None].float()
        if self is Rotation.ROUNDED_PRODUCTS:
            return products[0].to(x.dtype) + products[1].to(x.dtype)
        return (products[0] + products[1]).to(x.dtype)
