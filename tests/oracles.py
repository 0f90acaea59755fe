"""What the papers say, in float64 and plain loops. Written from the formulas, never from ``patches``.

Notation of the papers: d rotated width, b base, L0 trained length, s factor, m query position,
n key position. Nothing here is fast and nothing here imports the project.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

# Frequencies


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


# Rotation, distances, bias


def rotate(x: Sequence[float], position: float, inv_freq: Sequence[float], interleaved: bool) -> list[float]:
    """Turn pair i of ``x`` by position x inv_freq[i]; dimensions past the last pair stay."""
    turned = [float(value) for value in x]
    for i, f in enumerate(inv_freq):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + len(inv_freq))
        cos, sin = math.cos(position * f), math.sin(position * f)
        turned[a] = float(x[a]) * cos - float(x[b]) * sin
        turned[b] = float(x[b]) * cos + float(x[a]) * sin
    return turned


def self_extend_distance(m: int, n: int, group: int, window: int) -> int:
    """Self-Extend (arXiv:2401.01325), section 3.2: exact for neighbours, else by grouped positions."""
    if m - n < window:
        return m - n
    return m // group + window - window // group - n // group


def alibi_slopes(heads: int, bias_max: float = 8.0) -> list[float]:
    """ALiBi (arXiv:2108.12409), section 3, and its released code for other head counts."""
    closest = 2 ** math.floor(math.log2(heads))
    if closest == heads:
        ratio = 2 ** (-bias_max / heads)
        return [ratio ** (k + 1) for k in range(heads)]
    return alibi_slopes(closest, bias_max) + alibi_slopes(2 * closest, bias_max)[0::2][: heads - closest]


def log_n(m: int, l0: int) -> float:
    """Su's log-n scaling of the query at position m."""
    return max(1.0, math.log(m + 1) / math.log(l0))


# Whole score matrices


@dataclass(frozen=True)
class Model:
    """What the formulas need to know of a model and of one of its attention layers.

    ``window`` is the layer's own sliding window: only the last ``window`` keys count, the query's own included.
    """

    b: float
    d: int
    l0: int
    max_length: int
    heads: int
    scaling: float = 1.0
    interleaved: bool = False
    window: int | None = None


@dataclass(frozen=True)
class Encoding:
    """Everything a paper says about the score of query m and key n."""

    inv_freq: Sequence[float] = ()
    attention_factor: float = 1.0
    distance: Callable[[int, int], int] = lambda m, n: m - n
    slopes: Sequence[float] | None = None
    temperature: Callable[[int], float] = lambda m: 1.0


Fields = Mapping[str, Any]


def _yarn(p: Fields, model: Model, length: int) -> Encoding:
    s, turns = p["factor"], (p.get("beta_fast", 32.0), p.get("beta_slow", 1.0))
    factor = p.get("attention_factor") or yarn_attention_factor(s, p.get("mscale"), p.get("mscale_all_dim"))
    return Encoding(yarn(model.b, model.d, s, model.l0, turns, p.get("truncate", True)), factor)


def _ntk_by_parts(p: Fields, model: Model, length: int) -> Encoding:
    beta = p.get("beta_0", 1.25), p.get("beta_1", 0.75)
    gamma = p.get("gamma_0", 16.0), p.get("gamma_1", 2.0)
    return Encoding(ntk_by_parts(model.b, model.d, p["factor"], model.l0, beta, gamma))


def _llama3(p: Fields, model: Model, length: int) -> Encoding:
    turns = p.get("low_freq_factor", 1.0), p.get("high_freq_factor", 4.0)
    return Encoding(llama3(model.b, model.d, p.get("factor", 8.0), model.l0, *turns))


def _longrope(p: Fields, model: Model, length: int) -> Encoding:
    s = p.get("factor") or model.max_length / model.l0
    factor = p.get("attention_factor") or longrope_attention_factor(s, model.l0)
    return Encoding(longrope(model.b, model.d, p["short_factor"], p["long_factor"], model.l0, length), factor)


def _self_extend(p: Fields, model: Model, length: int) -> Encoding:
    group, window = p.get("group_size", 8), p.get("neighbor_window", model.l0 // 4)
    return Encoding(
        default(model.b, model.d),
        distance=lambda m, n: self_extend_distance(m, n, group, window),
        temperature=(lambda m: log_n(m, model.l0)) if p.get("log_n") else (lambda m: 1.0),
    )


METHODS: dict[str, Callable[[Fields, Model, int], Encoding]] = {
    "default": lambda p, model, length: Encoding(default(model.b, model.d)),
    "none": lambda p, model, length: Encoding(temperature=lambda m: float(p.get("attention_temperature", 1.0))),
    "linear": lambda p, model, length: Encoding(linear(model.b, model.d, p["factor"])),
    "ntk": lambda p, model, length: Encoding(ntk(model.b, model.d, p["factor"])),
    "dynamic": lambda p, model, length: Encoding(dynamic(model.b, model.d, p.get("factor", 1.0), model.l0, length)),
    "ntk_by_parts": _ntk_by_parts,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "alibi": lambda p, model, length: Encoding(slopes=alibi_slopes(model.heads, p.get("alibi_bias_max", 8.0))),
    "self_extend": _self_extend,
}


def encoding(fields: Fields, model: Model, length: int) -> Encoding:
    """The oracle of a request: ``fields`` by their names in the API, ``length`` the reserved length."""
    b, l0 = fields.get("rope_theta", model.b), fields.get("original_max_position_embeddings", model.l0)
    return METHODS[fields["method"]](fields, replace(model, b=b, l0=l0), length)


def scores(q: np.ndarray, k: np.ndarray, how: Encoding, model: Model) -> np.ndarray:
    """[heads, length, length] for q [heads, length, d] and k [kv_heads, length, d]; -inf outside the mask."""
    heads, length, _ = q.shape
    groups = heads // k.shape[0]
    matrix = np.full((heads, length, length), -np.inf)
    for head in range(heads):
        for m in range(length):
            for n in range(m + 1):
                if model.window is None or m - n < model.window:
                    matrix[head, m, n] = _product(q[head, m], k[head // groups, n], how.distance(m, n), how, model)
                    matrix[head, m, n] *= model.scaling * how.temperature(m)
                    matrix[head, m, n] -= how.slopes[head] * (m - n) if how.slopes is not None else 0.0
    return matrix


def _product(q: np.ndarray, k: np.ndarray, distance: int, how: Encoding, model: Model) -> float:
    """q turned by ``distance`` against k. The factor is on cos and sin: it leaves unrotated dimensions alone."""
    rotated = 2 * len(how.inv_freq)
    turned = rotate(q.tolist(), distance, how.inv_freq, model.interleaved)
    parts = [a * b for a, b in zip(turned, k.tolist(), strict=True)]
    return how.attention_factor**2 * math.fsum(parts[:rotated]) + math.fsum(parts[rotated:])


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, how: Encoding, model: Model) -> np.ndarray:
    """Softmax attention over ``scores``: [heads, length, d]."""
    matrix = scores(q, k, how, model)
    weights = np.exp(matrix - matrix.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.asarray(weights @ np.repeat(v.astype(np.float64), q.shape[0] // k.shape[0], axis=0))
