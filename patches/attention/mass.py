"""The share of softmax weight by distance, for every layer and head.

The reference attention (float32) computes the weights from the queries and keys of the model's own forward. It computes
the rows of chosen queries only, in blocks, so memory never holds all queries by all keys. The first keys count apart:
attention sinks, arXiv:2309.17453, section 3.1.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from patches.attention import reference
from patches.attention.layer import index_of
from patches.attention.observation import Observed

FIRST_KEYS = 4
"""Keys that count as sinks, as in StreamingLLM."""

BLOCK_WEIGHTS = 1 << 22
"""Most weights of one block of queries, over all heads."""


def distance_edges(length: int) -> list[int]:
    """0, 1, 2, 4, 8, ... and ``length``: bucket b has the distances edges[b] <= q_idx - kv_idx < edges[b + 1]."""
    return [0, *itertools.takewhile(lambda edge: edge < length, (1 << step for step in range(64))), length]


class AttentionMass:
    """Mean softmax weight by distance over the queries first <= q_idx < stop of one sequence.

    Feed the sequence from its beginning in chunks of any sizes, each forward within ``patch.observing(mass.observe)``,
    and evict nothing from its cache. In a layer with learned sinks, the masses of a head sum to less than 1.
    """

    def __init__(self, first: int, stop: int) -> None:
        """Raises:
        ValueError: without a query.
        """
        if not 0 <= first < stop:
            raise ValueError(f"queries {first} to {stop} are none")
        self.first, self.stop = first, stop
        self.edges = distance_edges(stop)
        self._sums: dict[int, torch.Tensor] = {}
        self._queries: dict[int, int] = {}

    @property
    def layers(self) -> list[int]:
        """Indices of the layers that attended, ascending."""
        return sorted(self._sums)

    def with_heads_of(self, others: Sequence[AttentionMass]) -> AttentionMass:
        """The same queries with the heads of ``others`` behind these, each from another rank."""
        whole = AttentionMass(self.first, self.stop)
        whole._sums = {layer: torch.cat([part._sums[layer] for part in (self, *others)]) for layer in self._sums}
        whole._queries = dict(self._queries)
        return whole

    def mass(self) -> np.ndarray:
        """float64 [layers, heads, buckets]: mean weight on the keys of each bucket of ``edges``."""
        return self._means()[..., :-2]

    def first_keys(self) -> np.ndarray:
        """float64 [layers, heads]: mean weight on keys 0 .. 3, which is also in the bucket of their distance."""
        return self._means()[..., -2]

    def entropy(self) -> np.ndarray:
        """float64 [layers, heads]: mean entropy of a query's weights in nats."""
        return self._means()[..., -1]

    def _means(self) -> np.ndarray:
        expected = self.stop - self.first
        if not self._sums or any(seen % expected for seen in self._queries.values()):
            raise ValueError(f"not every query from {self.first} to {self.stop} was observed in every layer")
        # A layer may attend more than once in a forward, over other values.
        return torch.stack([self._sums[layer] / self._queries[layer] for layer in self.layers]).numpy()

    @torch.no_grad()
    def observe(self, seen: Observed) -> None:
        """Add one segment in one layer.

        Raises:
            ValueError: for more than one row, or if keys were evicted.
        """
        if seen.query.shape[0] != 1:
            raise ValueError(f"observes one sequence at a time, not {seen.query.shape[0]} rows")
        if seen.num_sinks:
            raise ValueError("keys have left the cache from the middle: evict nothing while observing")
        assert seen.layer.attention is not None
        index = index_of(seen.layer.attention)
        q_stop = seen.q_start + seen.query.shape[2]
        first, stop = max(self.first, seen.q_start), min(self.stop, q_stop)
        size = max(1, BLOCK_WEIGHTS // (seen.query.shape[1] * seen.key.shape[2]))
        for low in range(first, stop, size):
            high = min(low + size, stop)
            query = seen.query[:, :, low - seen.q_start : high - seen.q_start]
            key = seen.key[:, :, : seen.key.shape[2] - (q_stop - high)]  # ends at the block's last query
            layer = seen.layer.part(slice(None), slice(low - seen.q_start, high - seen.q_start), slice(key.shape[2]))
            weights = reference.weights(query, key, seen.resolved, layer, q_start=low)[0]
            sums = self._sums_of(weights, low).cpu()
            self._sums[index] = self._sums[index] + sums if index in self._sums else sums
            self._queries[index] = self._queries.get(index, 0) + high - low

    def _sums_of(self, weights: torch.Tensor, q_low: int) -> torch.Tensor:
        """float64 [heads, buckets + 2] of ``weights`` [heads, q, k], summed over queries q_low, q_low + 1, ..."""
        heads, queries, keys = weights.shape
        k_start = q_low + queries - keys
        before = torch.nn.functional.pad(weights.double().cumsum(-1), (1, 0))  # [..., c]: weight on columns below c
        q_idx = torch.arange(q_low, q_low + queries, device=weights.device)[:, None]
        edges = torch.tensor(self.edges, device=weights.device)
        # Distances below an edge are those of the keys after q_idx - edge.
        columns = (q_idx - edges + 1 - k_start).clamp(0, keys)
        at_edges = before.gather(-1, columns.expand(heads, -1, -1))
        buckets = at_edges[..., :-1] - at_edges[..., 1:]
        first_keys = before[..., min(max(FIRST_KEYS - k_start, 0), keys)]
        entropy = torch.special.entr(weights.double()).sum(-1)
        return torch.cat((buckets, first_keys[..., None], entropy[..., None]), dim=-1).sum(1)
