"""Rotation by a distance, and the effective distance of a query to a key."""

from __future__ import annotations

import math
from collections.abc import Sequence

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


def dual_chunk_distance(m: int, n: int, size: int, l0: int) -> int:
    """DCA (arXiv:2402.17463), section 3: intra-chunk, successive-chunk and inter-chunk attention up to L0 - 1."""
    chunks_apart = m // size - n // size
    if chunks_apart == 0:
        query = m % size
    elif chunks_apart == 1:
        query = min(m % size + size, l0 - 1)
    else:
        query = l0 - 1
    return query - n % size


def chunk_llama_distance(m: int, n: int, chunk_size: int, local_window: int) -> int:
    """HKUNLP/ChunkLlama: two tables of query positions, each as long as a chunk. Every chunk before the one next to
    the query's is read at the last entry of the second table."""
    chunk_len = chunk_size - local_window
    q_t = list(range(chunk_len))
    qc_t = [min(t + chunk_len, chunk_size) for t in q_t]
    key, chunks_apart = n % chunk_len, m // chunk_len - n // chunk_len
    if chunks_apart == 0:
        return q_t[m % chunk_len] - key
    if chunks_apart == 1:
        return qc_t[m % chunk_len] - key
    return qc_t[chunk_len - 1] - key


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
