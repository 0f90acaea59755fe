"""Methods that move positions or leave pairs out: distances, reach and parameters against the papers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patches import METHODS, RopeGeometry, parse, resolve
from tests import oracles
from tests.methods import ROWS, Fields, Row
from tests.patches.distances import effective_distance, plain_distance
from tests.patches.methods.drawn_maps import (
    ATTENDED,
    DRAWN,
    GEOMETRY,
    HEADS,
    MODEL,
    MOVING,
    TRAINED,
    drawn,
    parameters_of,
)


def chunk_and_cap(p: Fields) -> tuple[int, int]:
    if p["formulation"] == "paper":
        return p["chunk_size"], TRAINED - 1
    return p["chunk_size"] - p["local_window"], p["chunk_size"]


NEAR: dict[str, Callable[[Fields], int]] = {
    "self_extend": lambda p: p["neighbor_window"],
    "rerope": lambda p: p["window"],
    "leaky_rerope": lambda p: p["window"],
    # To the chunk before, distances are exact up to cap - S; two chunks apart is S + 1 at least.
    "dual_chunk": lambda p: 1 + min(chunk_and_cap(p)[0], chunk_and_cap(p)[1] - chunk_and_cap(p)[0]),
    "string": lambda p: p["shifted_offset"],
    "dpe": lambda p: p["neighbor_window"],
    "lm_infinite": lambda p: p["n_local"],
    "streaming": lambda p: p["window"],
}
"""Distance below which every pair keeps its own."""

PLAIN: dict[str, Callable[[Fields], int]] = NEAR | {
    "dual_chunk": lambda p: chunk_and_cap(p)[0],
    "streaming": lambda p: p["sink_tokens"] + p["window"],
}
"""Input length up to which the method is plain RoPE."""


def test_every_map_is_drawn_here() -> None:
    assert set(DRAWN) == set(MOVING) == set(NEAR) == set(PLAIN)
    assert set(ATTENDED) == {row.name for row in ROWS if not row.covers_all}


# Distances


@given(drawn, st.integers(1, 70))
def test_distances_are_the_papers(fields: Fields, length: int) -> None:
    distance = effective_distance(parse(fields).recipe(GEOMETRY), length)
    how = oracles.encoding(fields, MODEL, length)
    expected = np.full(distance.shape, np.nan)
    for m in range(length):
        for n in range(m + 1):
            paper = how.distance(m, n)
            expected[m, n] = np.nan if paper is None else paper
    np.testing.assert_allclose(distance.numpy(), expected, rtol=0, atol=1e-12)


@given(drawn, st.integers(1, 70))
def test_near_pairs_keep_their_distance(fields: Fields, length: int) -> None:
    distance, plain = effective_distance(parse(fields).recipe(GEOMETRY), length), plain_distance(length)
    near = plain[..., 0] < NEAR[fields["method"]](parameters_of(fields))
    assert torch.equal(distance[near], plain[near].expand_as(distance[near]))


@given(drawn)
def test_short_inputs_are_plain_rope(fields: Fields) -> None:
    length = PLAIN[fields["method"]](parameters_of(fields))
    distance = effective_distance(parse(fields).recipe(GEOMETRY), length)
    plain = plain_distance(length).expand_as(distance)
    assert torch.equal(distance.nan_to_num(-1.0), plain.nan_to_num(-1.0))


@pytest.mark.parametrize("name", DRAWN)
@given(st.data())
def test_no_distance_is_untrained_up_to_the_reach_and_one_is_past_it(name: str, data: st.DataObject) -> None:
    fields: Fields = {"method": name, **data.draw(DRAWN[name])}
    row, recipe = MOVING[name], parse(fields).recipe(GEOMETRY)
    assert row.reach is not None
    reach = row.reach(parameters_of(fields))
    longest = int(min(reach, 6 * TRAINED))
    assert effective_distance(recipe, longest).nan_to_num(0.0).max() <= TRAINED - 1
    if math.isfinite(reach):
        assert effective_distance(recipe, int(reach) + 1).nan_to_num(0.0).max() > TRAINED - 1


@pytest.mark.parametrize("row", MOVING.values(), ids=lambda row: row.name)
@pytest.mark.parametrize("trained", [16, 64, 100, 256])
def test_the_reach_of_the_defaults(row: Row, trained: int) -> None:
    """With what is left at its default, a method reaches further than plain RoPE, or says why it does not."""
    geometry = RopeGeometry(64, 64, 1e4, trained, trained, HEADS)
    required = {"group_factors": [4, 2]} if row.name == "dpe" else {}
    method = parse({"method": row.name, **required})
    assert row.reach is not None
    reach = row.reach(method.parameters(geometry))
    assert reach > trained or row.name == "lm_infinite"
    distance = effective_distance(method.recipe(geometry), int(min(reach, 3 * trained)))
    assert distance.nan_to_num(0.0).max() <= trained - 1


@pytest.mark.parametrize(("group", "window"), [(1, 1), (1, 15), (2, 8), (4, 12), (7, 14), (8, 8)])
def test_the_reach_of_self_extend_is_the_papers_for_windows_of_whole_groups(group: int, window: int) -> None:
    fields = {"method": "self_extend", "group_size": group, "neighbor_window": window}
    reach = MOVING["self_extend"].reach
    assert reach is not None
    assert reach(parameters_of(fields)) == (TRAINED - window) * group + window
    last = effective_distance(parse(fields).recipe(GEOMETRY), (TRAINED - window) * group + window)[-1]
    assert last.max() == TRAINED - 1


def test_the_released_lm_infinite_puts_its_first_tokens_one_past_the_trained_distances() -> None:
    distance = effective_distance(parse({"method": "lm_infinite"}).recipe(GEOMETRY), 3 * TRAINED)
    assert distance[-1, :10].flatten().tolist() == [TRAINED] * 10
    assert distance.nan_to_num(0.0).max() == TRAINED
    assert "one past the trained distances" in METHODS["lm_infinite"].reach


@pytest.mark.parametrize(
    ("chunk_size", "local_window", "query", "distance"),
    [(24, 16, 16, 15), (24, 16, 23, 15), (24, 12, 24, 23), (24, 11, 26, 24), (24, 4, 40, 24), (24, 23, 2, 1)],
)
def test_chunk_llama_reads_older_chunks_at_the_last_position_of_its_table(
    chunk_size: int, local_window: int, query: int, distance: int
) -> None:
    """The position is min(2 x chunk - 1, chunk_size): below chunk_size once the local window is half of it."""
    fields = {"method": "dual_chunk", "chunk_size": chunk_size, "local_window": local_window}
    recipe = parse(fields).recipe(GEOMETRY)
    assert effective_distance(recipe, query + 1)[query, 0].tolist() == [distance]
    assert oracles.encoding(fields, MODEL, query + 1).distance(query, 0) == distance


# Parameters


def test_defaults_follow_the_trained_length_and_are_echoed() -> None:
    llama = RopeGeometry(128, 128, 1e4, 4096, 4096, 32)
    expected: dict[str, Fields] = {
        "self_extend": {"neighbor_window": 1024, "group_size": 8},
        "rerope": {"window": 1024},
        "leaky_rerope": {"window": 1024, "scaling_factor": 16.0},
        "dual_chunk": {"formulation": "repository", "chunk_size": 3072, "local_window": 512},
        "string": {"shifted_offset": 1365, "small_local_value": 128},
        "lm_infinite": {"n_global": 10, "n_local": 4096, "limit_distance": 4096},
        "streaming": {"sink_tokens": 4, "window": 4092, "absolute_positions": False},
    }
    for name, parameters in expected.items():
        assert parameters.items() <= parse({"method": name}).parameters(llama).items(), name
    factors = {"group_factors": [2, 8, 2, 8, 32, 32, 32, 4]}
    assert parse({"method": "dpe", **factors}).parameters(llama)["neighbor_window"] == 1024
    paper = parse({"method": "dual_chunk", "formulation": "paper"}).parameters(llama)
    assert (paper["chunk_size"], paper["local_window"]) == (3072, None)
    halved = parse({"method": "rerope", "original_max_position_embeddings": 2048}).parameters(llama)
    assert halved["window"] == 512


def test_dpe_groups_pairs_from_the_highest_frequencies_on() -> None:
    llama = RopeGeometry(128, 128, 1e4, 8192, 8192, 32)
    far = parse({"method": "dpe", "group_factors": [2, 8, 2, 8, 32, 32, 32, 4]}).recipe(llama).bands[1]
    keys = far.key_map(torch.tensor([0, 100]))
    assert keys[1].tolist() == [100 // s for s in (2, 8, 2, 8, 32, 32, 32, 4) for _ in range(8)]
    equal = parse({"method": "dpe", "group_factors": [3], "neighbor_window": 7}).recipe(GEOMETRY)
    same = parse({"method": "self_extend", "group_size": 3, "neighbor_window": 7}).recipe(GEOMETRY)
    distance = effective_distance(equal, 50)
    torch.testing.assert_close(distance, effective_distance(same, 50).expand_as(distance), equal_nan=True)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"method": "dual_chunk", "chunk_size": 8, "local_window": 8}, r"^local_window: .*at most 7$"),
    ({"method": "dual_chunk", "formulation": "paper", "chunk_size": 16}, r"^chunk_size: .*below .*16"),
    ({"method": "dual_chunk", "formulation": "paper", "local_window": 2}, r"^local_window: .*repository"),
    ({"method": "string", "shifted_offset": 5, "small_local_value": 6}, r"^small_local_value: .*0 and .*5$"),
    ({"method": "dpe", "group_factors": [1, 2, 3]}, r"^group_factors: .*8 rotary pairs.*3 groups"),
    ({"method": "lm_infinite", "n_local": 9, "limit_distance": 7}, r"^limit_distance: .*at least .*8"),
    ({"method": "streaming", "sink_tokens": 16}, r"^sink_tokens: at most 15"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[message[1:10] for _, message in REFUSED])
def test_parameters_that_do_not_fit_together(fields: Fields, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(parse(fields), GEOMETRY, 100)


def test_what_barely_fits_is_taken() -> None:
    for fields in (
        {"method": "dual_chunk", "chunk_size": 8, "local_window": 7},
        {"method": "dual_chunk", "formulation": "paper", "chunk_size": 15},
        {"method": "string", "shifted_offset": 5, "small_local_value": 5},
        {"method": "lm_infinite", "n_local": 9, "limit_distance": 8},
        {"method": "streaming", "sink_tokens": 16, "window": 1},
        {"method": "streaming", "sink_tokens": 15},
    ):
        resolve(parse(fields), GEOMETRY, 100)
