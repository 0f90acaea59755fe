"""Requests of every method that moves positions or leaves pairs out, drawn for a small model."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from hypothesis import strategies as st

from patches import RopeGeometry, parse
from tests import oracles
from tests.methods import ROWS, Fields

TRAINED, HEAD_DIM, HEADS, SCALING = 16, 16, 2, 0.3
GEOMETRY = RopeGeometry(HEAD_DIM, HEAD_DIM, 1e4, TRAINED, TRAINED, HEADS)
MODEL = oracles.Model(1e4, HEAD_DIM, TRAINED, TRAINED, HEADS, SCALING)
MOVING = {row.name: row for row in ROWS if row.reach is not None}

windows = st.integers(1, TRAINED - 1)
groups = st.integers(1, 12)

DRAWN: dict[str, st.SearchStrategy[Fields]] = {
    "self_extend": st.fixed_dictionaries({"group_size": groups, "neighbor_window": windows}),
    "rerope": st.fixed_dictionaries({"window": st.integers(1, TRAINED)}),
    # Quarters, so that float64 divides without rounding where the reach is decided.
    "leaky_rerope": st.fixed_dictionaries(
        {"window": windows, "scaling_factor": st.integers(4, 40).map(lambda n: n / 4)}
    ),
    "dual_chunk": st.integers(2, TRAINED).flatmap(
        lambda size: st.fixed_dictionaries({"chunk_size": st.just(size), "local_window": st.integers(0, size - 1)})
    )
    | st.fixed_dictionaries({"formulation": st.just("paper"), "chunk_size": windows.filter(lambda n: n > 1)}),
    "string": windows.flatmap(
        lambda offset: st.fixed_dictionaries(
            {"shifted_offset": st.just(offset), "small_local_value": st.integers(0, offset)}
        )
    ),
    "dpe": st.fixed_dictionaries(
        {
            "group_factors": st.sampled_from([1, 2, 4, 8]).flatmap(lambda n: st.lists(groups, min_size=n, max_size=n)),
            "neighbor_window": windows,
        }
    ),
    "lm_infinite": st.integers(1, TRAINED).flatmap(
        lambda n_local: st.fixed_dictionaries(
            {
                "n_global": st.integers(1, 10),
                "n_local": st.just(n_local),
                "limit_distance": st.integers(max(1, n_local - 1), TRAINED + 4),
            }
        )
    ),
    "streaming": st.fixed_dictionaries(
        {"sink_tokens": st.integers(0, 6), "window": windows, "absolute_positions": st.booleans()}
    ),
}

drawn = st.one_of([st.builds(operator.or_, st.just({"method": name}), fields) for name, fields in DRAWN.items()])
"""Requests of every method of the table, with all parameters given."""


def parameters_of(fields: Fields) -> Fields:
    return parse(fields).parameters(GEOMETRY)


ATTENDED: dict[str, Callable[[Fields, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "lm_infinite": lambda p, m, n: (m - n < p["n_local"]) | (n < p["n_global"]),
    "streaming": lambda p, m, n: (m - n < p["window"]) | (n < p["sink_tokens"]),
}
"""Of the methods that leave causal pairs out: which ones they attend to."""
