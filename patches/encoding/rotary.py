"""Rotary position embedding: base frequencies, angles and the rotation itself. The only copy.

RoFormer (arXiv:2104.09864), equations 14-16 and 34. Angles, cosines and sines are float32: in
bfloat16 position 1995 reads as 2000.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def base_inv_freq(rope_theta: float, rotary_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """rope_theta^(-2i/rotary_dim) for i = 0 .. rotary_dim/2 - 1, ``dtype`` [rotary_dim / 2].

    The expression is transformers' own, operation by operation. An unscaled schedule in float32 is therefore
    bit-identical to the unpatched model.
    """
    import torch

    exponent = torch.arange(0, rotary_dim, 2, dtype=dtype) / rotary_dim
    return torch.as_tensor(1.0 / (rope_theta**exponent))


def per_pair(position: torch.Tensor) -> torch.Tensor:
    """Positions [n] or [n, pairs] from a position map, as [n, 1] or [n, pairs]."""
    return position if position.ndim == 2 else position[:, None]


def upcast(states: torch.Tensor) -> torch.Tensor:
    """``states`` in float32, or unchanged in float64: the dtypes of softmax and rotation."""
    import torch

    return states.to(torch.promote_types(states.dtype, torch.float32))


def rotary_table(
    position: torch.Tensor, inv_freq: torch.Tensor, attention_factor: torch.Tensor | float, *, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [..., rotary_dim], already multiplied by ``attention_factor``.

    ``position`` [..., 1], or [..., rotary_dim / 2] if positions differ by pair;
    ``inv_freq`` [rotary_dim / 2] or [..., rotary_dim / 2]. The half-split layout repeats the
    frequencies one after the other, the interleaved layout pair by pair.
    """
    import torch

    angles = position.float() * inv_freq
    cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
    if interleaved:
        return cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


def rotate(
    states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool, offset: int = 0
) -> torch.Tensor:
    """Rotate dimensions offset .. offset + cos.shape[-1] of ``states`` [..., n, head_dim]; the rest passes through.

    Half-split pairs (i, i + d/2), as Llama and GPT-NeoX; interleaved pairs (2i, 2i + 1), as GPT-J.
    The product is taken in float32, or float64 for such states, and returned in the dtype of ``states``. Its two parts
    are rounded before they are added, as transformers does.
    """
    own = _rotating(states, cos, offset)
    others = _swapped(own, interleaved).mul_(signed(sin, interleaved=interleaved))
    return _among_the_rest((own * cos).add_(others), states, offset)


def signed(sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """``sin`` [..., rotary_dim], negative for the first of each pair: over the states it would be one pass more."""
    import torch

    if interleaved:
        return torch.stack((-sin[..., 0::2], sin[..., 1::2]), dim=-1).flatten(-2)
    half = sin.shape[-1] // 2
    return torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)


def turn(
    states: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor, *, interleaved: bool, offset: int = 0
) -> torch.Tensor:
    """``rotate`` with a table whose ``sin`` is ``signed`` already, in one pass and one rounding less."""
    own = _rotating(states, cos, offset)
    turned = (own * cos).addcmul_(_swapped(own, interleaved), signed_sin)
    return _among_the_rest(turned, states, offset)


def turn_into(
    out: torch.Tensor,
    states: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    *,
    interleaved: bool,
    offset: int = 0,
) -> None:
    """``turn`` into other memory or that of ``states`` itself, to the same bits."""
    import torch

    if states.dtype == torch.float32 and cos.shape[-1] == states.shape[-1] and not states.requires_grad:
        others = _swapped(states, interleaved)
        torch.mul(states, cos, out=out).addcmul_(others, signed_sin)
    else:
        out.copy_(turn(states, cos, signed_sin, interleaved=interleaved, offset=offset))


def _swapped(states: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """A copy of ``states`` [..., rotary_dim] with the two numbers of each pair exchanged."""
    if interleaved:
        by_pair: torch.Tensor = states.unflatten(-1, (-1, 2))
        return by_pair.flip(-1).flatten(-2)
    return states.roll(states.shape[-1] // 2, -1)


def _rotating(states: torch.Tensor, cos: torch.Tensor, offset: int) -> torch.Tensor:
    """The dimensions of ``states`` that rotate, in the dtype of their product."""
    width = cos.shape[-1]
    return upcast(states if width == states.shape[-1] else states[..., offset : offset + width])


def _among_the_rest(rotated: torch.Tensor, states: torch.Tensor, offset: int) -> torch.Tensor:
    """``states`` whose dimensions from ``offset`` on are ``rotated``."""
    import torch

    rotated, width = rotated.to(states.dtype), rotated.shape[-1]
    if width == states.shape[-1]:
        return rotated
    return torch.cat((states[..., :offset], rotated, states[..., offset + width :]), dim=-1)
