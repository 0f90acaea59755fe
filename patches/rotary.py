"""Rotary position embedding: base frequencies, angles and the rotation itself. The only copy.

RoFormer (arXiv:2104.09864), equations 14-16 and 34. Angles, cosines and sines are float32: in
bfloat16 position 1995 reads as 2000.
"""

from __future__ import annotations

import torch


def base_inv_freq(rope_theta: float, rotary_dim: int) -> torch.Tensor:
    """rope_theta^(-2i/rotary_dim) for i = 0 .. rotary_dim/2 - 1, float32 [rotary_dim / 2].

    The expression is transformers' own, operation by operation, so that an unscaled schedule is
    bit-identical to the unpatched model.
    """
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float) / rotary_dim
    return torch.as_tensor(1.0 / (rope_theta**exponent))


def rotary_table(
    position: torch.Tensor, inv_freq: torch.Tensor, attention_factor: torch.Tensor | float, *, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [..., rotary_dim], already multiplied by ``attention_factor``.

    ``position`` [...] and ``inv_freq`` [rotary_dim / 2] or [..., rotary_dim / 2]. The half-split
    layout repeats the frequencies one after the other, the interleaved layout pair by pair.
    """
    angles = position[..., None].float() * inv_freq
    angles = angles.repeat_interleave(2, dim=-1) if interleaved else torch.cat((angles, angles), dim=-1)
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Rotate the first cos.shape[-1] dimensions of ``states`` [..., n, head_dim]; the rest passes through.

    Half-split pairs (i, i + d/2), as Llama and GPT-NeoX; interleaved pairs (2i, 2i + 1), as GPT-J.
    The product is taken in float32 and returned in the dtype of ``states``.
    """
    rotary_dim = cos.shape[-1]
    rotated, passed = states[..., :rotary_dim].float(), states[..., rotary_dim:]
    if interleaved:
        turned = torch.stack((-rotated[..., 1::2], rotated[..., 0::2]), dim=-1).flatten(-2)
    else:
        first, second = rotated.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    result = (rotated * cos + turned * sin).to(states.dtype)
    return torch.cat((result, passed), dim=-1) if passed.shape[-1] else result
