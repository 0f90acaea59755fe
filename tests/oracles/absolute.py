"""Absolute positions: vectors added to the tokens."""

from __future__ import annotations

import math

import numpy as np


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
