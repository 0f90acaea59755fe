"""Attention of methods that move positions or leave pairs out, in chunks, against the papers."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patches import parse, resolve
from patches.attention import fused, reference
from patches.attention.layer import Layer
from patches.batch.segments import Batch
from tests import oracles
from tests.methods import Fields
from tests.patches.distances import effective_distance
from tests.patches.forward import written
from tests.patches.methods.drawn_maps import GEOMETRY, HEAD_DIM, HEADS, MODEL, SCALING, drawn


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
