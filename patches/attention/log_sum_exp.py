"""Scaled dot-product attention that also returns the log of its softmax sum, and the exact merge.

Two attentions over disjoint keys merge without error into one softmax: out = sum_b exp(lse_b - lse)
out_b (FlashAttention, arXiv:2205.14135, section 3.1). Public SDPA returns no log-sum-exp, so the
kernels behind it are called by name, per device. Other devices and float64 compute it in plain operations.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from patches.encoding.rotary import upcast

Attended = tuple[torch.Tensor, torch.Tensor]


def has_kernel(*states: torch.Tensor) -> bool:
    """True if a kernel without a matrix of scores takes these queries, keys and values.

    The kernels' log-sum-exp has no gradient, and is float32. Under autocast, states may differ in dtype.
    """
    device, dtype = states[0].device.type, states[0].dtype
    alike = all(each.dtype == dtype and not each.requires_grad for each in states)
    return alike and dtype != torch.float64 and device in ("cpu", "cuda")


def sdpa_with_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scaling: float,
    *,
    causal: bool = False,
) -> Attended:
    """Output [rows, heads, q, head_dim] and log-sum-exp [rows, heads, q], which is float32 or float64.

    ``bias`` is additive and broadcastable to [rows, heads, q, k]. Excluded pairs have the most negative finite number.
    A row without any key then weighs nothing in a merge, and nothing is NaN. ``causal``, for as many keys as queries
    and without a bias, lets query i attend to keys 0 .. i.
    """
    if not has_kernel(query, key, value):
        return eager_with_lse(query, key, value, bias, scaling, causal=causal)
    if value.shape[-1] != query.shape[-1]:  # the kernels want one width (latent attention has two)
        query, key, padded = (widened(states, max(query.shape[-1], value.shape[-1])) for states in (query, key, value))
        out, lse = sdpa_with_lse(query, key, padded, bias, scaling, causal=causal)
        return out[..., : value.shape[-1]], lse
    rows, heads, new, width = query.shape
    if heads > key.shape[1] and new > 1 and bias is None and not causal:
        # Kernels read keys again for each head. Without a mask, heads that share a key head are its queries.
        out, lse = sdpa_with_lse(query.reshape(rows, key.shape[1], -1, width), key, value, None, scaling)
        return out.reshape(query.shape), lse.reshape(query.shape[:3])
    if query.device.type == "cuda":
        return _cuda(query, key, value, bias, scaling, causal)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=bias, scale=scaling
    )
    return out, lse


def widened(states: torch.Tensor, width: int) -> torch.Tensor:
    """``states`` [..., dim] with zeros behind its last dimension up to ``width``: products of such states stay."""
    return states if states.shape[-1] == width else F.pad(states, (0, width - states.shape[-1]))


def eager_with_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scaling: float,
    *,
    causal: bool = False,
) -> Attended:
    """``sdpa_with_lse`` in plain operations, for devices and dtypes without a kernel, and as the kernels' oracle."""
    groups = query.shape[1] // key.shape[1]
    key, value = upcast(key.repeat_interleave(groups, 1)), upcast(value.repeat_interleave(groups, 1))
    scores = upcast(query) @ key.transpose(-1, -2) * scaling
    if bias is not None:
        scores = scores + bias
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, torch.finfo(scores.dtype).min)
    lse = torch.logsumexp(scores, dim=-1)
    return (torch.exp(scores - lse[..., None]) @ value).to(query.dtype), lse


def _cuda(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scaling: float,
    causal: bool,
) -> Attended:
    if bias is None and _flash_takes(query):
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scaling)
        return out, lse
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if bias is not None:
        # The kernel reads the bias in aligned runs of 16 elements: pad its last axis, then slice. It multiplies
        # scores by log2(e). The most negative number would be infinite, and rows without any key would merge to NaN.
        shape = (*query.shape[:3], key.shape[2])
        padded = torch.empty((*shape[:3], -(-shape[3] // 16) * 16), dtype=query.dtype, device=query.device)
        bias = padded[..., : shape[3]].copy_(bias.clamp_min(torch.finfo(query.dtype).min / 2))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, 0.0, causal, scale=scaling
    )
    return out, lse[..., : query.shape[2]]


def _flash_takes(query: torch.Tensor) -> bool:
    """True if FlashAttention takes such queries. It is faster, and heads may share key heads, but it has no bias."""
    is_fit = query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    return is_fit and torch.cuda.get_device_capability(query.device) >= (8, 0)


def nothing(query: torch.Tensor, width: int) -> Attended:
    """Empty output and log-sum-exp for ``query`` [rows, heads, q, head_dim], float32 or float64."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    out = torch.zeros(*query.shape[:3], width, dtype=dtype, device=query.device)
    return out, torch.full(query.shape[:3], float("-inf"), dtype=dtype, device=query.device)


def add(attended: Attended, new: torch.Tensor, new_lse: torch.Tensor) -> None:
    """Merge the attention to other keys into ``attended``, in place and in its dtype whatever that of ``new``."""
    out, lse = attended
    # Autograd needs the values from before the update in place.
    old, old_lse = (out.clone(), lse.clone()) if new.requires_grad else attended
    total, weight = torch.logaddexp(old_lse, new_lse), _weight(old_lse, new_lse)
    if new.requires_grad:
        out.copy_(old.lerp(new.to(out.dtype), weight))
    else:
        out.lerp_(new.to(out.dtype), weight)
    lse.copy_(total)


def merged(left: Attended, right: Attended) -> Attended:
    """The attention to the keys of both, in the dtype of the log-sum-exps."""
    total, weight = torch.logaddexp(left[1], right[1]), _weight(left[1], right[1])
    return left[0].to(total.dtype).lerp(right[0].to(total.dtype), weight), total


def _weight(old_lse: torch.Tensor, new_lse: torch.Tensor) -> torch.Tensor:
    """Share [..., 1] of the new keys in the softmax over all. A share near 1 is as exact as one near 0."""
    return torch.sigmoid(new_lse - old_lse)[..., None]


def part(states: Attended, columns: slice) -> Attended:
    """Views of some columns of both."""
    return states[0][:, :, columns], states[1][:, :, columns]
