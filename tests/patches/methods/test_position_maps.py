"""Methods that move positions or leave pairs out: distances, masks, reach, and attention against the papers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patches import METHODS, RopeGeometry, parse, resolve
from patches.attention import fused, reference
from patches.attention.layer import Layer
from patches.batch.segments import Batch
from tests import oracles
from tests.methods import ROWS, Fields, Row
from tests.patches.distances import effective_distance, plain_distance
from tests.patches.forward import written

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

ATTENDED: dict[str, Callable[[Fields, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "lm_infinite": lambda p, m, n: (m - n < p["n_local"]) | (n < p["n_global"]),
    "streaming": lambda p, m, n: (m - n < p["window"]) | (n < p["sink_tokens"]),
}
"""Of the methods that leave causal pairs out: which ones they attend to."""


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


def test_a_fractional_shift_misplaces_every_far_key() -> None:
    """w / G in place of w // G, as in files that the authors left uncorrected."""
    group, window, length = 3, 7, 40
    recipe = parse({"method": "self_extend", "group_size": group, "neighbor_window": window}).recipe(GEOMETRY)
    m, n = np.arange(length)[:, None], np.arange(length)[None]
    fractional = np.where(m - n < window, m - n, m // group - n // group + window - window / group).astype(float)
    off = effective_distance(recipe, length)[..., 0].numpy() - fractional
    assert off[m - n >= window] == pytest.approx(1 / 3)
    assert off[(m - n < window) & (m >= n)] == pytest.approx(0.0)

    rng = np.random.default_rng(0)
    q, k, v = (2 * rng.standard_normal((HEADS, length, HEAD_DIM)) for _ in "qkv")
    frequencies = oracles.default(1e4, HEAD_DIM)
    wrong = oracles.Encoding(frequencies, distance=lambda m, n: float(fractional[m, n]))
    fields = {"method": "self_extend", "group_size": group, "neighbor_window": window}
    result = attended("reference", fields, (q, k, v), [length])
    assert np.abs(result - oracles.attention(q, k, v, wrong, MODEL)).max() > 1e-2


# Masks


@given(drawn, st.integers(1, 70))
def test_bands_are_disjoint_and_cover_what_is_documented(fields: Fields, length: int) -> None:
    m, n = torch.arange(length)[:, None], torch.arange(length)[None]
    covered = torch.stack([band.predicate(m, n).int() for band in parse(fields).recipe(GEOMETRY).bands]).sum(0)
    expected = m >= n
    if fields["method"] in ATTENDED:
        expected &= ATTENDED[fields["method"]](parameters_of(fields), m, n)
    assert torch.equal(covered, expected.int())


@given(drawn, st.integers(0, 60), st.integers(0, 40))
def test_key_ranges_hold_every_covered_pair_and_no_more(fields: Fields, q_low: int, more: int) -> None:
    q_idx, kv_idx = torch.arange(q_low, q_low + more + 1)[:, None], torch.arange(q_low + more + 20)[None]
    for band in parse(fields).recipe(GEOMETRY).bands:
        keys = band.predicate(q_idx, kv_idx).any(0).nonzero().flatten().tolist()
        first, last = band.predicate.key_range(q_low, q_low + more)
        assert 0 <= first <= last
        if keys:
            assert (first, last) == (keys[0], keys[-1] + 1)


@given(drawn)
def test_bands_come_from_near_to_far(fields: Fields) -> None:
    distance = plain_distance(70)[..., 0]
    m, n = torch.arange(70)[:, None], torch.arange(70)[None]
    closest = [distance[band.predicate(m, n)].min() for band in parse(fields).recipe(GEOMETRY).bands]
    assert closest[0] == 0
    assert closest == sorted(closest)


@given(drawn, st.integers(1, 70))
def test_a_layer_that_does_not_rotate_keeps_the_mask(fields: Fields, length: int) -> None:
    m, n = torch.arange(length)[:, None], torch.arange(length)[None]
    resolved = resolve(parse(fields), GEOMETRY, length)
    before, after = (
        torch.stack([band.predicate(m, n).int() for band in bands]).sum(0)
        for bands in (resolved.recipe.bands, resolved.unrotated.recipe.bands)
    )
    assert torch.equal(before, after)
    if MOVING[fields["method"]].covers_all:
        assert resolved.unrotated.is_plain


@given(drawn, st.integers(1, 70))
def test_only_windowed_methods_let_keys_go_and_none_that_is_attended_later(fields: Fields, length: int) -> None:
    recipe = parse(fields).recipe(GEOMETRY)
    assert (recipe.sink_window is None) == MOVING[fields["method"]].covers_all
    if recipe.sink_window is not None:
        first, last = recipe.sink_window
        m, n = torch.arange(length)[:, None], torch.arange(length)[None]
        gone = (n >= first) & (m - n >= last)
        assert not any(bool((band.predicate(m, n) & gone).any()) for band in recipe.bands)


@pytest.mark.parametrize("name", ATTENDED)
def test_methods_that_forget_say_so(name: str) -> None:
    assert "does not extend recall" in METHODS[name].training_free
    assert "recall" in METHODS[name].avoid.lower()
    assert "recall" in METHODS[name].reach


# Attention


def attended(how: str, fields: Fields, qkv: tuple[np.ndarray, ...], chunks: list[int]) -> np.ndarray:
    """Attention output of queries that come in chunks of these sizes, over the keys seen so far."""
    query, key, value = (torch.tensor(x, dtype=torch.float32)[None] for x in qkv)
    resolved = resolve(parse(fields), GEOMETRY, query.shape[2])
    query, key = written(query, resolved), written(key, resolved)
    outputs, layer = [], Layer(SCALING)
    for start, stop in pairwise([0, *accumulate(chunks)]):
        tensors = query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop], resolved
        if how == "reference":
            outputs.append(reference.attend(*tensors, layer, q_start=start))
        else:
            outputs.append(fused.attend(*tensors, Batch([]), layer, q_start=start))
    return torch.cat(outputs, dim=2)[0].numpy()


@st.composite
def chunked(draw: st.DrawFn) -> list[int]:
    """Sizes of the chunks of one input: whole, token by token, or anything between."""
    length = draw(st.integers(2, 48))
    cuts = draw(st.sets(st.integers(1, length - 1)) | st.just(set(range(1, length))) | st.just(set()))
    return [b - a for a, b in pairwise([0, *sorted(cuts), length])]


@pytest.mark.parametrize("block", [512, 7], ids=["one_block", "blocks_of_7"])
@pytest.mark.parametrize("how", ["reference", "fused"])
def test_attention_is_the_papers_however_it_is_chunked(how: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "reference" and block != 512:
        pytest.skip("the reference has no blocks")
    monkeypatch.setattr("patches.attention.blocks.QUERY_BLOCK", block)

    @settings(max_examples=40)
    @given(drawn, chunked(), st.integers(0, 1000))
    def over_maps(fields: Fields, chunks: list[int], seed: int) -> None:
        length, rng = sum(chunks), np.random.default_rng(seed)
        q, k, v = (2 * rng.standard_normal((heads, length, HEAD_DIM)) for heads in (HEADS, 1, 1))
        expected = oracles.attention(q, k, v, oracles.encoding(fields, MODEL, length), MODEL)
        result = attended(how, fields, (q, k, v), chunks)
        np.testing.assert_allclose(result, expected, rtol=0, atol=5e-5)

    over_maps()


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
