"""Launches of the fused kernels. None depends on the number of tokens, except by its grid, and none reads numbers.

Multiplications and additions stay apart (``enable_fp_fusion=False``), because separate operations round in between.
"""

from __future__ import annotations

import torch

from patches.attention.paged.tables import power_of_two
from patches.model.fusion.forms import DTYPES, Activation, Layout, Norm, Rotation

WIDEST = 32768
"""Numbers of a row that one program normalises."""

COLUMNS = 1024
"""Columns of a gated product that one program computes."""


def takes(*tensors: torch.Tensor) -> bool:
    """True for plain tensors of one device and one dtype of the kernels, none of them empty."""
    dtype, device = tensors[0].dtype, tensors[0].device
    return dtype in DTYPES and all(
        type(each) in (torch.Tensor, torch.nn.Parameter)
        and (each.dtype, each.device) == (dtype, device)
        and each.numel() > 0
        for each in tensors
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, form: Norm) -> torch.Tensor | None:
    """``form`` of ``x`` [..., n] and ``weight`` [n]; None for other tensors.

    Rows may lie in any order, such as by token and then by head, and the result has the same. Rows with gaps, such as
    heads in a product that has keys and values too, become contiguous.
    """
    width = weight.shape[0]
    if not takes(x, weight) or x.shape[-1] != width or width > WIDEST or weight.stride(0) != 1:
        return None
    out = torch.empty_like(x)
    rows: tuple[int, int, int] | None = (1, width, 0)
    if out.stride() != x.stride():
        out, rows = x.new_empty(x.shape), _rows(x)
    if rows is None or x.stride(-1) != 1:
        return None
    _norm((x, x, weight, out, out), eps, rows, form)
    return out


def added_norm(
    x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float, form: Norm
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The sum of ``x`` and ``added`` [..., n], and ``form`` of it; None for other tensors."""
    width = weight.shape[0]
    if not takes(x, added, weight) or x.shape != added.shape or x.shape[-1] != width or width > WIDEST:
        return None
    if not (x.is_contiguous() and added.is_contiguous() and weight.is_contiguous()):
        return None
    total, out = torch.empty_like(x), torch.empty_like(x)
    _norm((x, added, weight, total, out), eps, (1, width, 0), form, adds=True)
    return total, out


def _norm(
    tensors: tuple[torch.Tensor, ...], eps: float, rows: tuple[int, int, int], form: Norm, *, adds: bool = False
) -> None:
    """Launch the kernel for x, the numbers added to it, the weight, their sum, and the output."""
    from patches.model.fusion import kernels

    x, weight = tensors[0], tensors[2]
    width = weight.shape[0]
    block = power_of_two(width)
    kernels.rms_norm[(x.numel() // width,)](
        *(*tensors, eps, *rows),
        WIDTH=width,
        BLOCK=block,
        ROUNDED_FIRST=form is Norm.ROUNDED_FIRST,
        ONE_MORE=form is Norm.ONE_MORE,
        ADDS=adds,
        IN_BITS=kernels.INTERPRETED,
        num_warps=min(max(block // 512, 1), 16),
        enable_fp_fusion=False,
    )


def _rows(x: torch.Tensor) -> tuple[int, int, int] | None:
    """(inner rows, stride of outer ones, stride of inner ones) of ``x`` [..., n]; None for three indices and more."""
    outer = [(size, stride) for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    if len(outer) > 2:
        return None
    (_, first), (inner, second) = [(1, 0)] * (2 - len(outer)) + outer
    return inner, first, second


def _row(x: torch.Tensor) -> int | None:
    """The stride of rows of ``x`` [..., n], if all have the same distance; else None."""
    rows = _rows(x)
    if rows is None or x.stride(-1) != 1:
        return None
    inner, first, second = rows
    return second if first in (0, inner * second) else None


def layout_of(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Layout | None:
    """Layout of ``rotate`` for these tensors; None for others."""
    if not takes(q, k) or not takes(cos, sin) or q.device != cos.device:
        return None
    tokens, dim = q.shape[-2:]
    rows = q.ndim == k.ndim == 4 and q.shape[0] == k.shape[0] == 1 and k.shape[-2:] == (tokens, dim)
    width = cos.shape[-1]
    tables = cos.shape == sin.shape == (1, tokens, width) and dim % 2 == 0 and width in (dim, dim // 2)
    if not rows or not tables or any(each.stride(-1) != 1 for each in (q, k, cos, sin)):
        return None
    return Layout(q.dtype, cos.dtype, width < dim)


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, form: Rotation
) -> tuple[torch.Tensor, torch.Tensor]:
    """``form`` of ``q`` and ``k``, each [1, heads, tokens, dim] over memory of [tokens, heads, dim].

    ``layout_of`` says which tensors fit.
    """
    from patches.model.fusion import kernels

    (heads, tokens, dim), kv_heads = q.shape[1:], k.shape[1]
    outputs = q.new_empty(1, tokens, heads, dim), k.new_empty(1, tokens, kv_heads, dim)
    kernels.rotate[(tokens, heads + kv_heads)](
        *(q, k, *outputs, cos, sin),
        *(*q.stride()[1:3], *k.stride()[1:3], cos.stride(1), sin.stride(1)),
        Q_HEADS=heads,
        K_HEADS=kv_heads,
        PAIRS=dim // 2,
        BLOCK=power_of_two(dim // 2),
        BY_PAIR=cos.shape[-1] < dim,
        ROUNDED_PRODUCTS=form is Rotation.ROUNDED_PRODUCTS,
        IN_BITS=kernels.INTERPRETED,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return outputs[0].transpose(1, 2), outputs[1].transpose(1, 2)


def gated(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor | None:
    """``activation`` of ``gate``, times ``up``, both [..., n]; None for other tensors.

    Both may be parts of one product.
    """
    rows = _row(gate), _row(up)
    if not takes(gate, up) or gate.shape != up.shape or None in rows:
        return None
    from patches.model.fusion import kernels

    out, width = gate.new_empty(gate.shape), gate.shape[-1]
    kernels.gated[(gate.numel() // width, -(-width // COLUMNS))](
        *(gate, up, out, *rows),
        WIDTH=width,
        BLOCK=COLUMNS,
        GELU=activation is Activation.GELU_TANH,
        IN_BITS=kernels.INTERPRETED,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out
