"""Text that documents of a request share, from hashes of windows of tokens (Broder 1997, shingles)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WINDOW = 32
"""Tokens of a window: so many in a row are rarely equal by chance."""
MOST_WINDOWS = 400_000
"""Of all documents; more tokens than that have a sample of their windows, the same in every document."""
LEAST = 0.1
"""Share of the shorter document that counts: a common header is less."""


def overlaps(documents: Sequence[Sequence[int]]) -> dict[int, tuple[int, float]]:
    """By index of a document: the earlier one that shares most with it, and their share of the shorter."""
    if len(documents) < 2:
        return {}
    every = max(1, sum(map(len, documents)) // MOST_WINDOWS)
    hashes = [_hashes(document, every) for document in documents]
    sizes = np.array([max(len(found), 1) for found in hashes])
    owner = np.repeat(np.arange(len(documents)), [len(found) for found in hashes])
    joined = np.concatenate(hashes)
    order = np.argsort(joined, kind="stable")
    _, begins, counts = np.unique(joined[order], return_index=True, return_counts=True)
    shared = np.zeros((len(documents), len(documents)))
    for begin, count in zip(begins[counts > 1], counts[counts > 1], strict=True):
        owners = owner[order[begin : begin + count]]
        shared[np.ix_(owners, owners)] += 1
    shares = np.tril(shared / np.minimum(sizes[:, None], sizes), -1)
    most = shares.argmax(axis=1)
    return {index: (int(at), float(shares[index, at])) for index, at in enumerate(most) if shares[index, at] >= LEAST}


def _hashes(token_ids: Sequence[int], every: int) -> np.ndarray:
    """The different hashes uint64 of a document's windows; one of ``every`` is kept."""
    ids = np.asarray(token_ids, np.uint64)
    hashes = np.zeros(max(len(ids) - WINDOW + 1, 0), np.uint64)
    for at in range(WINDOW):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + ids[at : at + len(hashes)] + np.uint64(1)
    hashes = (hashes ^ (hashes >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.unique(hashes[(hashes >> np.uint64(40)) % np.uint64(every) == 0])
