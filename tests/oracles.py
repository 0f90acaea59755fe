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
    """f_i s^(-steps(k, n)) over YaRN's range of n pairs; an empty range is a step from plain to interpolated."""
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


# Rotation, distances, bias


Distance = float | Sequence[float]
"""Effective distance of a query to a key: one number, or one for every rotary pair."""


def rotate(x: Sequence[float], position: Distance, inv_freq: Sequence[float], interleaved: bool) -> list[float]:
    """Turn pair i of ``x`` by position x inv_freq[i]; dimensions past the last pair stay."""
    turned = [float(value) for value in x]
    for i, f in enumerate(inv_freq):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + len(inv_freq))
        angle = f * (position if isinstance(position, int | float) else position[i])
        cos, sin = math.cos(angle), math.sin(angle)
        turned[a] = float(x[a]) * cos - float(x[b]) * sin
        turned[b] = float(x[b]) * cos + float(x[a]) * sin
    return turned


def self_extend_distance(m: int, n: int, group: int, window: int) -> int:
    """Self-Extend (arXiv:2401.01325), section 3.2: exact for neighbours, else by grouped positions."""
    if m - n < window:
        return m - n
    return m // group + window - window // group - n // group


def rerope_distance(m: int, n: int, window: int) -> int:
    """ReRoPE (kexue.fm 9708): the distance, the window at most."""
    return min(m - n, window)


def leaky_rerope_distance(m: int, n: int, window: int, k: float) -> float:
    """Leaky ReRoPE (kexue.fm 9708): past the window, distance grows k times as slowly."""
    return m - n if m - n < window else window + (m - n - window) / k


def dual_chunk_distance(m: int, n: int, chunk: int, cap: int) -> int:
    """DCA (arXiv:2402.17463): intra-chunk, successive-chunk and inter-chunk attention."""
    chunks_apart = m // chunk - n // chunk
    if chunks_apart == 0:
        query = m % chunk
    elif chunks_apart == 1:
        query = min(m % chunk + chunk, cap)
    else:
        query = cap
    return query - n % chunk


def string_distance(m: int, n: int, offset: int, local: int) -> int:
    """STRING (arXiv:2410.18745): from the offset on, distances are shifted down to ``local``."""
    return m - n if m - n < offset else m - n - offset + local


def dpe_distance(m: int, n: int, groups: Sequence[int], window: int) -> list[int]:
    """DPE (arXiv:2504.18857): Self-Extend, every rotary pair with its own group size."""
    return [self_extend_distance(m, n, group, window) for group in groups]


def lm_infinite_distance(m: int, n: int, n_global: int, n_local: int, limit: int) -> int | None:
    """LM-Infinite (arXiv:2308.16137): a window, and the first tokens at one distance."""
    if m - n < n_local:
        return m - n
    return limit if n < n_global else None


def streaming_distance(m: int, n: int, sinks: int, window: int, absolute: bool = False) -> int | None:
    """StreamingLLM (arXiv:2309.17453), section 3.2: tokens count by their places in the cache, if still there."""
    cache = list(range(m + 1))
    while len(cache) > sinks + window:
        del cache[sinks]
    if n not in cache:
        return None
    return m - n if absolute else cache.index(m) - cache.index(n)


def alibi_slopes(heads: int, bias_max: float = 8.0) -> list[float]:
    """ALiBi (arXiv:2108.12409), section 3, and its released code for other head counts."""
    closest = 2 ** math.floor(math.log2(heads))
    if closest == heads:
        ratio = 2 ** (-bias_max / heads)
        return [ratio ** (k + 1) for k in range(heads)]
    return alibi_slopes(closest, bias_max) + alibi_slopes(2 * closest, bias_max)[0::2][: heads - closest]


def bfloat16(x: float) -> float:
    """x with eight significant bits, ties to even."""
    fraction, exponent = math.frexp(x)
    return math.ldexp(round(math.ldexp(fraction, 8)), exponent - 8)


def sandwich(distance: int, head: int, heads: int, dim: int = 128) -> float:
    """Sandwich (arXiv:2212.10356), section 5: p_m . p_n over the compression ratio of head 0, 1, ..."""
    product = math.fsum(math.cos(distance / 10_000 ** (2 * i / dim)) for i in range(dim // 2))
    return (product - dim / 2) / (8 * (head + 1) / heads)


def kerple_log(distance: int, r1: float, r2: float) -> float:
    """KERPLE (arXiv:2205.09921), section 4: the logarithmic kernel."""
    return -r1 * math.log(1 + r2 * distance)


def kerple_power(distance: int, r1: float, r2: float) -> float:
    """KERPLE, section 4: the power kernel."""
    return float(-r1 * distance**r2)


def t5_bucket(distance: int, buckets: int = 32, max_distance: int = 128) -> int:
    """T5 (arXiv:1910.10683), causal: half of the buckets exact, then logarithmic, the last one open."""
    exact = buckets // 2
    if distance < exact:
        return distance
    share = math.log(distance / exact) / math.log(max_distance / exact)
    return min(buckets - 1, exact + math.floor(share * (buckets - exact)))


# Learned vectors for distances, added to q . k of one pair


def shaw(q: np.ndarray, vectors: np.ndarray, distance: int) -> float:
    """Shaw et al. (arXiv:1803.02155), equation 4: the vector of the clipped distance, beside the key."""
    row = vectors[min(distance, len(vectors) - 1)]
    return math.fsum(float(q[i]) * float(row[i]) for i in range(len(q)))


def transformer_xl(q: np.ndarray, k: np.ndarray, u: np.ndarray, v: np.ndarray, w: np.ndarray, distance: int) -> float:
    """Transformer-XL (arXiv:1901.02860), section 3.3, terms b, c and d; ``w`` [head_dim][width]."""
    width = w.shape[1]
    waves = [math.sin(distance / 10_000 ** (2 * i / width)) for i in range(width // 2)]
    waves += [math.cos(distance / 10_000 ** (2 * i / width)) for i in range(width // 2)]
    projected = [math.fsum(float(row[i]) * waves[i] for i in range(width)) for row in w]
    by_distance = math.fsum((float(q[i]) + float(v[i])) * projected[i] for i in range(len(q)))
    return by_distance + math.fsum(float(u[i]) * float(k[i]) for i in range(len(k)))


# Attention temperature


def log_n(m: int, l0: int) -> float:
    """Su's log-n scaling of the query at position m."""
    return max(1.0, math.log(m + 1) / math.log(l0))


def temperature(asked: Any, l0: int, length: int) -> Callable[[int], float]:
    """The multiplier of a query at position m, for a request's ``attention_temperature``."""
    if isinstance(asked, int | float):
        return lambda m: float(asked)
    p: dict[str, Any] = {"kind": asked} if isinstance(asked, str) else dict(asked)
    l0, s, n = p.get("length") or l0, p.get("factor", 1.0), length
    return {
        "constant": lambda m: float(p["multiplier"]),
        "yarn": lambda m: (0.1 * math.log(s) + 1) ** 2,
        "chunk_llama": lambda m: (0.05 * math.log(s) + 1) ** 2,
        "longrope": lambda m: 1 + math.log(s) / math.log(l0),
        "log_n": lambda m: log_n(m, l0),
        "floor_log": lambda m: 1 + p.get("beta", 0.1) * math.log(1 + math.floor((m + p.get("offset", 0)) / l0)),
        "reserved_length": lambda m: max(1.0, 0.1 * math.log(n / l0) + 1) ** 2,
    }[p["kind"]]


# Whole score matrices


@dataclass(frozen=True)
class Model:
    """What the formulas need to know of a model and of one of its attention layers.

    ``window`` is the layer's own sliding window: only the last ``window`` keys count, the query's own included.
    ``head_dim`` is for heads of which only d dimensions rotate.
    """

    b: float
    d: int
    l0: int
    max_length: int
    heads: int
    scaling: float = 1.0
    interleaved: bool = False
    window: int | None = None
    head_dim: int = 0


@dataclass(frozen=True)
class Encoding:
    """Everything a paper says about the score of query m and key n; distance None: the key is not attended.

    ``bias`` is of (head, m, n), heads from 0.
    """

    inv_freq: Sequence[float] = ()
    attention_factor: float = 1.0
    distance: Callable[[int, int], Distance | None] = lambda m, n: m - n
    bias: Callable[[int, int, int], float] | None = None
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
    return _moved(p, model, length, lambda m, n: self_extend_distance(m, n, group, window))


def _rerope(p: Fields, model: Model, length: int) -> Encoding:
    window = p.get("window", model.l0 // 4)
    return _moved(p, model, length, lambda m, n: rerope_distance(m, n, window))


def _leaky_rerope(p: Fields, model: Model, length: int) -> Encoding:
    window, k = p.get("window", model.l0 // 4), p.get("scaling_factor", 16.0)
    return _moved(p, model, length, lambda m, n: leaky_rerope_distance(m, n, window, k))


def _dual_chunk(p: Fields, model: Model, length: int) -> Encoding:
    size = p.get("chunk_size", model.l0 * 3 // 4)
    if p.get("formulation") == "paper":
        chunk, cap = size, model.l0 - 1
    else:
        chunk, cap = size - p.get("local_window", model.l0 // 8), size
    return _moved(p, model, length, lambda m, n: dual_chunk_distance(m, n, chunk, cap))


def _string(p: Fields, model: Model, length: int) -> Encoding:
    offset = p.get("shifted_offset", model.l0 // 3)
    local = p.get("small_local_value", min(128, offset // 4))
    return _moved(p, model, length, lambda m, n: string_distance(m, n, offset, local))


def _dpe(p: Fields, model: Model, length: int) -> Encoding:
    factors, window = p["group_factors"], p.get("neighbor_window", min(1024, model.l0 // 4))
    groups = [factors[i * len(factors) // (model.d // 2)] for i in range(model.d // 2)]
    return _moved(p, model, length, lambda m, n: dpe_distance(m, n, groups, window))


def _lm_infinite(p: Fields, model: Model, length: int) -> Encoding:
    n_global, n_local, limit = p.get("n_global", 10), p.get("n_local", model.l0), p.get("limit_distance", model.l0)
    return _moved(p, model, length, lambda m, n: lm_infinite_distance(m, n, n_global, n_local, limit))


def _streaming(p: Fields, model: Model, length: int) -> Encoding:
    sinks, absolute = p.get("sink_tokens", 4), p.get("absolute_positions", False)
    window = p.get("window", model.l0 - sinks)
    return _moved(p, model, length, lambda m, n: streaming_distance(m, n, sinks, window, absolute))


def _turns(p: Fields) -> tuple[float, float]:
    return p.get("beta_fast", 32.0), p.get("beta_slow", 1.0)


def _radix(steps: Callable[[float, float], float]) -> Callable[[Fields, Model, int], Encoding]:
    def encode(p: Fields, model: Model, length: int) -> Encoding:
        factor = p.get("attention_factor") or yarn_attention_factor(p["factor"])
        pairs = turns_range(*_turns(p), model.b, model.d, model.l0, p.get("truncate", True))
        return Encoding(radix(steps, model.b, model.d, p["factor"], *pairs), factor)

    return encode


def _dynamic_yarn(p: Fields, model: Model, length: int) -> Encoding:
    s = max(1.0, length / model.l0)
    frequencies = yarn(model.b, model.d, s, model.l0, _turns(p), p.get("truncate", True))
    return Encoding(frequencies, yarn_attention_factor(s))


def _yarn_paper(p: Fields, model: Model, length: int) -> Encoding:
    factor = p.get("attention_factor") or yarn_attention_factor(p["factor"])
    ramp_turns = p.get("alpha", 1.0), p.get("beta", 32.0)
    return Encoding(yarn_paper(model.b, model.d, p["factor"], model.l0, *ramp_turns), factor)


def _proportional(p: Fields, model: Model, length: int) -> Encoding:
    return Encoding(proportional(model.b, model.d, p.get("partial_rotary_factor", 1.0), p.get("factor", 1.0)))


def _base(p: Fields, model: Model, length: int) -> Encoding:
    return encoding(p.get("base") or {"method": "default"}, model, length)


def _moved(p: Fields, model: Model, length: int, distance: Callable[[int, int], Distance | None]) -> Encoding:
    return replace(_base(p, model, length), distance=distance)


def _resonance(p: Fields, model: Model, length: int) -> Encoding:
    base = _base(p, model, length)
    return replace(base, inv_freq=resonance(base.inv_freq))


def _clipped_rope(p: Fields, model: Model, length: int) -> Encoding:
    base = _base(p, model, length)
    n = p.get("n", min(20, model.d // 2))
    return replace(base, inv_freq=clipped(base.inv_freq, n, p.get("hard", False)))


def _alibi(p: Fields, model: Model, length: int) -> Encoding:
    factor = p.get("slope_factor", 1.0)
    divisor = max(1.0, length / model.l0) if factor == "dynamic" else factor
    slopes = [slope / divisor for slope in alibi_slopes(model.heads, p.get("alibi_bias_max", 8.0))]
    scale = 1 / math.sqrt(model.head_dim or model.d) if p.get("scaled") else 1.0
    if p.get("bias_dtype") == "bfloat16":
        return Encoding(bias=lambda head, m, n: bfloat16(bfloat16(slopes[head]) * bfloat16(n)) * scale)
    return Encoding(bias=lambda head, m, n: -slopes[head] * (m - n) * scale)


def _kerple(kernel: Callable[[int, float, float], float], *default: float) -> Callable[[Fields, Model, int], Encoding]:
    def encode(p: Fields, model: Model, length: int) -> Encoding:
        given = [p.get(name, value) for name, value in zip(("r1", "r2"), default, strict=True)]
        r1, r2 = ([value] * model.heads if isinstance(value, float) else value for value in given)
        return Encoding(bias=lambda head, m, n: kernel(m - n, r1[head], r2[head]))

    return encode


def _t5_bias(p: Fields, model: Model, length: int) -> Encoding:
    table = p["relative_attention_bias"]
    sizes = p.get("relative_attention_num_buckets", 32), p.get("relative_attention_max_distance", 128)
    return Encoding(bias=lambda head, m, n: float(table[t5_bucket(m - n, *sizes)][head]))


def _sandwich(p: Fields, model: Model, length: int) -> Encoding:
    return Encoding(bias=lambda head, m, n: sandwich(m - n, head, model.heads, p.get("dim", 128)))


def _drope(p: Fields, model: Model, length: int) -> Encoding:
    multiplier = 1 + p.get("coefficient", 0.41) * math.log(p.get("factor", 1.0))
    return Encoding(temperature=lambda m: multiplier)


METHODS: dict[str, Callable[[Fields, Model, int], Encoding]] = {
    "default": lambda p, model, length: Encoding(default(model.b, model.d)),
    "none": lambda p, model, length: Encoding(),
    "drope": _drope,
    "linear": lambda p, model, length: Encoding(linear(model.b, model.d, p["factor"])),
    "ntk": lambda p, model, length: Encoding(ntk(model.b, model.d, p["factor"])),
    "dynamic": lambda p, model, length: Encoding(dynamic(model.b, model.d, p.get("factor", 1.0), model.l0, length)),
    "ntk_by_parts": _ntk_by_parts,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "dynamic_linear": lambda p, model, length: Encoding(dynamic_linear(model.b, model.d, model.l0, length)),
    "dynamic_yarn": _dynamic_yarn,
    "yarn_paper": _yarn_paper,
    "ntk_fixed": lambda p, model, length: Encoding(su_fixed(model.b, model.d, p["factor"])),
    "ntk_mixed": lambda p, model, length: Encoding(su_mixed(model.b, model.d, p["factor"], p.get("b", 0.625))),
    "mrrope_uni": _radix(uniform_steps),
    "mrrope_pro": _radix(progressive_steps),
    "tailspline": _radix(tail_spline),
    "proportional": _proportional,
    "custom": lambda p, model, length: Encoding(p["inv_freq"], p.get("attention_factor", 1.0)),
    "resonance": _resonance,
    "clipped_rope": _clipped_rope,
    "alibi": _alibi,
    "sandwich": _sandwich,
    "kerple_log": _kerple(kerple_log, 1.0, 0.5),
    "kerple_power": _kerple(kerple_power, 0.5, 1.0),
    "t5_bias": _t5_bias,
    "self_extend": _self_extend,
    "rerope": _rerope,
    "leaky_rerope": _leaky_rerope,
    "dual_chunk": _dual_chunk,
    "string": _string,
    "dpe": _dpe,
    "lm_infinite": _lm_infinite,
    "streaming": _streaming,
}


def encoding(fields: Fields, model: Model, length: int) -> Encoding:
    """The oracle of a request: ``fields`` by their names in the API, ``length`` the reserved length."""
    b, l0 = fields.get("rope_theta", model.b), fields.get("original_max_position_embeddings", model.l0)
    how = METHODS[fields["method"]](fields, replace(model, b=b, l0=l0), length)
    asked = fields.get("attention_temperature")
    if asked is None:
        return how
    multiplier = temperature(asked, l0, length)
    if isinstance(asked, dict) and asked.get("rotated_only"):
        return replace(how, attention_factor=how.attention_factor * math.sqrt(multiplier(0)))
    return replace(how, temperature=multiplier)


def scores(q: np.ndarray, k: np.ndarray, how: Encoding, model: Model) -> np.ndarray:
    """[heads, length, length] for q [heads, length, d] and k [kv_heads, length, d]; -inf outside the mask."""
    heads, length, _ = q.shape
    groups = heads // k.shape[0]
    matrix = np.full((heads, length, length), -np.inf)
    for head in range(heads):
        for m in range(length):
            for n in range(m + 1):
                distance = how.distance(m, n)
                if distance is not None and (model.window is None or m - n < model.window):
                    matrix[head, m, n] = _product(q[head, m], k[head // groups, n], distance, how, model)
                    matrix[head, m, n] *= model.scaling * how.temperature(m)
                    matrix[head, m, n] += how.bias(head, m, n) if how.bias is not None else 0.0
    return matrix


def _product(q: np.ndarray, k: np.ndarray, distance: Distance, how: Encoding, model: Model) -> float:
    """q against k turned by -``distance``. The factor is on cos and sin: it leaves unrotated dimensions alone."""
    rotated = 2 * len(how.inv_freq)
    turned = rotate(k.tolist(), np.negative(distance).tolist(), how.inv_freq, model.interleaved)
    parts = [a * b for a, b in zip(q.tolist(), turned, strict=True)]
    return how.attention_factor**2 * math.fsum(parts[:rotated]) + math.fsum(parts[rotated:])


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, how: Encoding, model: Model) -> np.ndarray:
    """Softmax attention over ``scores``: [heads, length, d]."""
    matrix = scores(q, k, how, model)
    weights = np.exp(matrix - matrix.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.asarray(weights @ np.repeat(v.astype(np.float64), q.shape[0] // k.shape[0], axis=0))


# Absolute positions


def sinusoid(p: float, width: int, *, interleaved: bool) -> list[float]:
    """arXiv:1706.03762, section 3.5; not interleaved as tensor2tensor has it, sines first, exponent i/(width/2 - 1)."""
    pairs = width // 2
    if interleaved:
        return [wave(p * 1e4 ** (-2 * i / width)) for i in range(pairs) for wave in (math.sin, math.cos)]
    return [wave(p * 1e4 ** (-i / (pairs - 1))) for wave in (math.sin, math.cos) for i in range(pairs)]


def table_at(table: np.ndarray, x: float) -> np.ndarray:
    """A learned table between its rows, linearly; past the last row, that row."""
    low = min(math.floor(x), len(table) - 1)
    high = min(low + 1, len(table) - 1)
    return np.asarray((1 - (x - low)) * table[low] + (x - low) * table[high] if high > low else table[low])


def hierarchical(table: np.ndarray, p: int, alpha: float) -> np.ndarray:
    """Su, kexue.fm 7947: alpha u_i + (1 - alpha) u_j at p = (i - 1) L0 + j, with u = (T - alpha T_1) / (1 - alpha)."""
    u = (table - alpha * table[0]) / (1 - alpha)
    i, j = divmod(p, len(table))
    return np.asarray(alpha * u[i] + (1 - alpha) * u[j])
