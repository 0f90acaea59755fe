"""Whole score matrices, and attention over them."""

from __future__ import annotations

import math

import numpy as np

from tests.oracles.distances import Distance, rotate
from tests.oracles.encodings import Encoding, Model


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
