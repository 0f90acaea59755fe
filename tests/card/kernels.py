"""Kernels that only CUDA has, in plain operations and with their limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from patches.attention.log_sum_exp import eager_with_lse


@contextmanager
def on_host() -> Iterator[None]:
    """Inside, operations are ordinary ones of the CPU."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def check_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, **_: object
) -> None:
    """No kernel of CUDA takes a mask and shared key heads; torch would write down all scores."""
    assert attn_mask is None or query.shape[1] == key.shape[1], "a mask, and heads that share key heads"


def _efficient_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, *given: Any, scale: float
) -> tuple[torch.Tensor, ...]:
    """CUDA's kernel wants as many key heads as query heads, and a bias of whole size in aligned rows.

    It computes powers of two, see torch's ``mem_eff_attention/kernel_forward.h``. The most negative number overflows
    by the factor. A row without another score then has no sum.
    """
    assert query.shape[1] == key.shape[1] == value.shape[1]
    with on_host():
        scores = query.float() @ key.float().transpose(-1, -2) * scale
        if bias is not None:
            assert bias.shape == scores.shape
            assert bias.dtype == query.dtype
            assert (bias.stride(-1), bias.stride(-2) % 8) == (1, 0)
            scores = scores + bias.float()
        scores = scores * math.log2(math.e)
        if given[2:] == (True,):
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
        top = scores.amax(-1, keepdim=True)
        weights = torch.where(top == float("-inf"), 0.0, (scores - top).exp2())
        total = weights.sum(-1, keepdim=True)
        out = (weights @ value.float() / torch.where(total == 0, 1.0, total)).to(query.dtype)
        sums = (top / math.log2(math.e) + total.log())[..., 0]
        return out, torch.nn.functional.pad(sums, (0, -sums.shape[-1] % 32)), torch.zeros(()), torch.zeros(())


def _flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *given: Any, scale: float
) -> tuple[torch.Tensor | int, ...]:
    """CUDA's kernel takes states of half precision and one width, and heads that share key heads."""
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert query.shape[-1] % 8 == 0
    with on_host():
        attended = eager_with_lse(query, key, value, None, scale, causal=given == (0.0, True))
        unused = torch.zeros(())
        return *attended, unused, unused, query.shape[2], key.shape[2], unused, unused, unused


KERNELS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_efficient_attention": _efficient_attention,
    "_scaled_dot_product_flash_attention": _flash_attention,
    "histc": lambda one, *arguments: torch.histc(one.float(), *arguments).to(one.dtype),  # for integers on CUDA only
}
