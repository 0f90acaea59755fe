"""Frequencies of the rotary pairs, and the factors on cos and sin that belong to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence


def default(b: float, d: int) -> list[float]:
    """RoFormer (arXiv:2104.09864), section 3.2.2: b^(-2i/d)."""
    return [b ** (-2 * i / d) for i in range(d // 2)]


def linear(b: float, d: int, s: float) -> list[float]:
    """Position interpolation (arXiv:2306.15595), equation 4: f(x, m / s)."""
    return [f / s for f in default(b, d)]


def ntk_base(b: float, d: int, s: float) -> float:
    """YaRN (arXiv:2309.00071), equation 16: b' = b s^(d / (d - 2))."""
    return float(b * s ** (d / (d - 2)))


def ntk(b: float, d: int, s: float) -> list[float]:
    return default(ntk_base(b, d, s), d)


def dynamic_scale(s: float, l0: int, length: int) -> float:
    """emozilla 2023, as transformers computes it: s l / L0 - (s - 1), and 1 up to L0."""
    return max(1.0, s * length / l0 - (s - 1))


def dynamic(b: float, d: int, s: float, l0: int, length: int) -> list[float]:
    return ntk(b, d, dynamic_scale(s, l0, length))


def pair_with_turns(turns: float, b: float, d: int, l0: int) -> float:
    """The i at which L0 b^(-2i/d) / 2 pi = turns."""
    return d * math.log(l0 / (2 * math.pi * turns)) / (2 * math.log(b))


def ramp(i: int, first: float, last: float) -> float:
    if first == last:
        last += 0.001
    return min(1.0, max(0.0, (i - first) / (last - first)))


def turns_range(fast: float, slow: float, b: float, d: int, l0: int, truncate: bool = True) -> tuple[float, float]:
    first, last = pair_with_turns(fast, b, d, l0), pair_with_turns(slow, b, d, l0)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    return max(first, 0), min(last, d - 1)


def ntk_by_parts(
    b: float,
    d: int,
    s: float,
    l0: int,
    beta: tuple[float, float] = (1.25, 0.75),
    gamma: tuple[float, float] = (16.0, 2.0),
) -> list[float]:
    """First released version (jquesnelle/yarn, LlamaPartNTKScaledRotaryEmbedding): two nested blends."""
    beta_range, gamma_range = turns_range(*beta, b, d, l0), turns_range(*gamma, b, d, l0)
    frequencies = []
    for i, (plain, aware) in enumerate(zip(default(b, d), ntk(b, d, s), strict=True)):
        to_linear, to_scaled = ramp(i, *beta_range), ramp(i, *gamma_range)
        scaled = (1 - to_linear) * aware + to_linear * plain / s
        frequencies.append((1 - to_scaled) * plain + to_scaled * scaled)
    return frequencies


def yarn(
    b: float, d: int, s: float, l0: int, turns: tuple[float, float] = (32.0, 1.0), truncate: bool = True
) -> list[float]:
    """YaRN, section 3.2, with the ramp of the released code (linear in the pair index)."""
    first, last = turns_range(*turns, b, d, l0, truncate)
    return [
        (1 - ramp(i, first, last)) * plain + ramp(i, first, last) * plain / s for i, plain in enumerate(default(b, d))
    ]


def yarn_attention_factor(s: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """YaRN, equation 22: sqrt(1 / t) = 0.1 ln s + 1; DeepSeek's ratio where both weights are given."""

    def weighted(weight: float) -> float:
        return 1.0 if s <= 1 else 0.1 * weight * math.log(s) + 1.0

    if mscale and mscale_all_dim:
        return weighted(mscale) / weighted(mscale_all_dim)
    return weighted(1.0)


def llama3(b: float, d: int, s: float, l0: int, low: float = 1.0, high: float = 4.0) -> list[float]:
    """Meta's release, ``apply_scaling``: by wavelength against L0 / low and L0 / high."""
    frequencies = []
    for f in default(b, d):
        wavelength = 2 * math.pi / f
        if wavelength < l0 / high:
            frequencies.append(f)
        elif wavelength > l0 / low:
            frequencies.append(f / s)
        else:
            smooth = (l0 / wavelength - low) / (high - low)
            frequencies.append((1 - smooth) * f / s + smooth * f)
    return frequencies


def longrope(b: float, d: int, short: Sequence[float], long: Sequence[float], l0: int, length: int) -> list[float]:
    """LongRoPE (arXiv:2402.13753), equation 2; the long list from the first token past L0."""
    divisors = long if length > l0 else short
    return [f / e for f, e in zip(default(b, d), divisors, strict=True)]


def longrope_attention_factor(s: float, l0: int) -> float:
    """LongRoPE's released code: sqrt(1 + ln s / ln L0)."""
    return 1.0 if s <= 1 else math.sqrt(1 + math.log(s) / math.log(l0))


def dynamic_linear(b: float, d: int, l0: int, length: int) -> list[float]:
    """ "Dynamic scaling" (YaRN, section 3.3) of position interpolation: s = max(1, l / L0)."""
    return linear(b, d, max(1.0, length / l0))


def yarn_paper(b: float, d: int, s: float, l0: int, alpha: float = 1.0, beta: float = 32.0) -> list[float]:
    """YaRN, equations 17 to 20: gamma is linear in r = L0 / wavelength."""
    frequencies = []
    for f in default(b, d):
        r = l0 * f / (2 * math.pi)
        gamma = 0.0 if r < alpha else 1.0 if r > beta else (r - alpha) / (beta - alpha)
        frequencies.append((1 - gamma) * f / s + gamma * f)
    return frequencies


def su_fixed(b: float, d: int, s: float) -> list[float]:
    """Su (kexue.fm 9948), NTK-RoPE-fixed: f_i s^(-2(i + 1) / d)."""
    return [f * s ** (-2 * (i + 1) / d) for i, f in enumerate(default(b, d))]


def su_mixed(b: float, d: int, s: float, power: float = 0.625) -> list[float]:
    """Su (kexue.fm 9948), NTK-RoPE-mixed: f_i exp(-a (i + 1)^power), a = ln s / (d / 2)^power."""
    a = math.log(s) / (d / 2) ** power
    return [f * math.exp(-a * (i + 1) ** power) for i, f in enumerate(default(b, d))]


def uniform_steps(k: float, n: float) -> float:
    """MrRoPE-Uni (arXiv:2601.22181): every pair of the range is scaled s^(1/n) more than the one before."""
    return k / n


def progressive_steps(k: float, n: float) -> float:
    """MrRoPE-Pro: the k-th pair is scaled s^(2k / n(n + 1)) more than the one before."""
    return k * (k + 1) / (n * (n + 1))


def tail_spline(k: float, n: float) -> float:
    """TailSpline (draft, 2026)."""
    return k * (3 * n * n + 3 * n + 1 - k * k) / (n * (n + 1) * (2 * n + 1))


def radix(steps: Callable[[float, float], float], b: float, d: int, s: float, first: float, last: float) -> list[float]:
    """f_i s^(-steps(k, n)) over YaRN's range of n pairs. An empty range is a step from plain to interpolated."""
    frequencies = []
    for i, f in enumerate(default(b, d)):
        if i <= first:
            frequencies.append(f)
        elif i >= last:
            frequencies.append(f / s)
        else:
            frequencies.append(f * s ** -steps(i - first, last - first))
    return frequencies


def proportional(b: float, head_dim: int, p: float, s: float = 1.0) -> list[float]:
    """p-RoPE (arXiv:2410.06205, section 6): b^(-2i / head_dim) for the first p head_dim / 2 pairs, then none."""
    rotating = int(p * head_dim / 2)
    return [f / s if i < rotating else 0.0 for i, f in enumerate(default(b, head_dim))]


def resonance(frequencies: Sequence[float]) -> list[float]:
    """Resonance RoPE (arXiv:2403.00071), section 4: wavelengths rounded to integers."""
    return [2 * math.pi / round(2 * math.pi / f) if f else 0.0 for f in frequencies]


def clipped(frequencies: Sequence[float], n: int, hard: bool = False) -> list[float]:
    """Clipped RoPE (arXiv:2602.05258): the last n times (1 + cos x) / 2, x evenly from 0 to pi; hard: nothing left."""
    kept = len(frequencies) - n
    soft = [0.0 if hard or j == n - 1 else (1 + math.cos(math.pi * j / (n - 1))) / 2 for j in range(n)]
    return [*frequencies[:kept], *(f * weight for f, weight in zip(frequencies[kept:], soft, strict=True))]
