"""Terms added to the score of a query and a key: biases, and products with learned vectors for distances."""

from __future__ import annotations

import math

import numpy as np


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
