"""The fused operations in Triton. They compute in float32, and round where the separate operations round.

Compiled only where Triton is installed; ``patches.model.fusion.launch`` imports it there.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = triton.knobs.runtime.interpret
"""True under TRITON_INTERPRET=1: tensors are on the CPU, and casts to bfloat16 truncate."""


@triton.jit
def _rounded(x, DTYPE: tl.constexpr, IN_BITS: tl.constexpr):
    """float32 rounded to the numbers of ``DTYPE``; to those of bfloat16 ``IN_BITS``, where a cast truncates."""
    if IN_BITS and DTYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 32767 + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    else:
        rounded = x.to(DTYPE).to(tl.float32)
    return rounded


@triton.jit(do_not_specialize=["inner"])  # the number of tokens, in some models
def rms_norm(
    X, ADDED, WEIGHT, SUM, OUT, eps, inner, outer_stride, inner_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROUNDED_FIRST: tl.constexpr, ONE_MORE: tl.constexpr,
    ADDS: tl.constexpr, IN_BITS: tl.constexpr,
):  # fmt: skip
    """Program (row): ``WIDTH`` numbers. An outer index has ``inner`` rows; those of ``OUT`` have no gaps.

    With ``ADDS``, it is the norm of ``SUM``, of ``X`` and ``ADDED``, which have no gaps either.
    """
    row = tl.program_id(0).to(tl.int64)
    at = row * WIDTH
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    source = X + row // inner * outer_stride + row % inner * inner_stride
    x = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(ADDED + at + column, mask=inside, other=0.0).to(tl.float32)
        x = _rounded(x, SUM.dtype.element_ty, IN_BITS)
        tl.store(SUM + at + column, x.to(SUM.dtype.element_ty), mask=inside)
    weight = tl.load(WEIGHT + column, mask=inside, other=0.0).to(tl.float32)
    quotient = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    if ROUNDED_FIRST:
        quotient = _rounded(quotient, OUT.dtype.element_ty, IN_BITS)
    if ONE_MORE:
        weight = weight + 1.0
    out = _rounded(weight * quotient, OUT.dtype.element_ty, IN_BITS)
    tl.store(OUT + at + column, out.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def rotate(
    Q, K, Q_OUT, K_OUT, COS, SIN, q_head, q_token, k_head, k_token, cos_token, sin_token,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
    BY_PAIR: tl.constexpr, ROUNDED_PRODUCTS: tl.constexpr, IN_BITS: tl.constexpr,
):  # fmt: skip
    """Program (token, head): the heads of keys come behind those of queries. Outputs are [tokens, heads, dim]."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, BLOCK)
    inside = pair < PAIRS
    if head < Q_HEADS:
        at, to = Q + head * q_head + token * q_token, Q_OUT + (token * Q_HEADS + head) * 2 * PAIRS
    else:
        at = K + (head - Q_HEADS) * k_head + token * k_token
        to = K_OUT + (token * K_HEADS + head - Q_HEADS) * 2 * PAIRS
    first = tl.load(at + pair, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + PAIRS + pair, mask=inside, other=0.0).to(tl.float32)
    cos, sin = COS + token * cos_token + pair, SIN + token * sin_token + pair
    cos_first = tl.load(cos, mask=inside, other=0.0).to(tl.float32)
    sin_first = tl.load(sin, mask=inside, other=0.0).to(tl.float32)
    cos_second, sin_second = cos_first, sin_first
    if not BY_PAIR:
        cos_second = tl.load(cos + PAIRS, mask=inside, other=0.0).to(tl.float32)
        sin_second = tl.load(sin + PAIRS, mask=inside, other=0.0).to(tl.float32)
    a, b = first * cos_first, -second * sin_first
    c, d = second * cos_second, first * sin_second
    if ROUNDED_PRODUCTS:
        a, b = _rounded(a, Q_OUT.dtype.element_ty, IN_BITS), _rounded(b, Q_OUT.dtype.element_ty, IN_BITS)
        c, d = _rounded(c, Q_OUT.dtype.element_ty, IN_BITS), _rounded(d, Q_OUT.dtype.element_ty, IN_BITS)
    one, two = _rounded(a + b, Q_OUT.dtype.element_ty, IN_BITS), _rounded(c + d, Q_OUT.dtype.element_ty, IN_BITS)
    tl.store(to + pair, one.to(Q_OUT.dtype.element_ty), mask=inside)
    tl.store(to + PAIRS + pair, two.to(Q_OUT.dtype.element_ty), mask=inside)


@triton.jit
def gated(
    GATE, UP, OUT, gate_row, up_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr, IN_BITS: tl.constexpr
):  # fmt: skip
    """Program (row, block of columns): rows of ``WIDTH`` numbers. Those of ``OUT`` have no gaps."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(GATE + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(UP + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
    steep = gate
    if GELU:  # half of 1 + tanh(z) is the logistic function of 2 z
        steep = 1.5957691216057308 * (gate + 0.044715 * (gate * gate * gate))
    divisor = 1.0 + tl.exp(tl.minimum(-steep, 88.0))  # no overflow
    activated = _rounded(tl.div_rn(gate, divisor), OUT.dtype.element_ty, IN_BITS)
    out = _rounded(activated * up, OUT.dtype.element_ty, IN_BITS)
    tl.store(OUT + row * WIDTH + column, out.to(OUT.dtype.element_ty), mask=inside)
