"""From the outcomes of a probe's passes to what its result reports."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from service.evaluation.probe.results import Attention, Copying, DistanceBucket, HeadAttention
from service.evaluation.statistics.proportion import wilson
from service.evaluation.unit import Outcome
from service.sharing.stopping import check_wanted


def heads_attention(length: int, outcomes: Sequence[Outcome]) -> list[HeadAttention]:
    """Every layer's and head's attention, averaged over documents."""
    check_wanted()
    edges, layers = outcomes[0]["edges"].tolist(), outcomes[0]["layers"].tolist()
    mass, first_keys, entropy = (_mean(outcomes, name) for name in ("mass", "first_keys", "entropy"))
    return [
        HeadAttention(
            layer=layer,
            head=head,
            length=length,
            buckets=_buckets(edges, mass[row, head]),
            first_keys=float(first_keys[row, head]),
            entropy=float(entropy[row, head]),
        )
        for row, layer in enumerate(layers)
        for head in range(mass.shape[1])
    ]


def mean_attention(length: int, outcomes: Sequence[Outcome]) -> Attention:
    """The average over layers, heads and documents."""
    return Attention(
        length=length,
        buckets=_buckets(outcomes[0]["edges"].tolist(), _mean(outcomes, "mass").mean((0, 1))),
        first_keys=float(_mean(outcomes, "first_keys").mean()),
        entropy=float(_mean(outcomes, "entropy").mean()),
    )


def copying(distance: int, outcomes: Sequence[Outcome]) -> Copying:
    """Accuracy and NLL over the tokens of all samples at one distance."""
    hits, hits_first = (_joined(outcomes, name) == 1 for name in ("ranks", "ranks_first"))
    return Copying(
        distance=distance,
        accuracy=float(hits.mean()),
        interval=wilson(int(hits.sum()), len(hits)),
        nll_mean=float(_joined(outcomes, "nll").mean()),
        accuracy_first=float(hits_first.mean()),
        nll_first=float(_joined(outcomes, "nll_first").mean()),
        tokens=len(hits),
    )


def _joined(outcomes: Sequence[Outcome], name: str) -> np.ndarray:
    return np.concatenate([outcome[name] for outcome in outcomes])


def _mean(outcomes: Sequence[Outcome], name: str) -> np.ndarray:
    return np.asarray(np.mean([outcome[name] for outcome in outcomes], axis=0))


def _buckets(edges: Sequence[int], mass: np.ndarray) -> list[DistanceBucket]:
    return [
        DistanceBucket(start=start, stop=stop, mass=value)
        for (start, stop), value in zip(pairwise(edges), mass.tolist(), strict=True)
    ]
