"""Attention by oneDNN's products: the numbers of plain operations in float64, and which calls take it."""

from __future__ import annotations

import pytest
import torch

from patches.attention import log_sum_exp, onednn
from patches.attention.log_sum_exp import eager_with_lse, sdpa_with_lse
from patches.attention.onednn import KEYS, LEAST_KEYS, LEAST_QUERIES, QUERIES, attend
from patches.model.hf import patched
from tests.models import tiny_model, tiny_tokens

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")

SCALING = 0.3


def states(heads: int, new: int, keys: int, dim: int = 16, *, spread: float = 1.0) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    made = torch.randn(2, heads, new, dim), torch.randn(2, heads, keys, dim), torch.randn(2, heads, keys, dim)
    return made[0] * spread, *made[1:]


def check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, atol: float = 2e-5) -> None:
    out, lse = attend(query, key, value, SCALING)
    expected, expected_lse = eager_with_lse(query.double(), key.double(), value.double(), None, SCALING)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("new", [1, QUERIES - 1, QUERIES + 1])
@pytest.mark.parametrize("keys", [1, KEYS, 2 * KEYS + 1])
def test_numbers_are_those_of_the_formula(new: int, keys: int) -> None:
    check(*states(2, new, keys))


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    check(*states(1, 40, 2 * KEYS, spread=300.0), atol=2e-4)  # scores of hundreds have such roundings


def test_states_may_be_views() -> None:
    """Keys lie between those of other heads in a cache, and queries of heads side by side."""
    query, key, value = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in states(3, 70, KEYS + 7))
    check(query, key, value[..., :])
    check(query[:, :, ::2], key[:, :, ::2], value[:, :, ::2])


ONE = (1, 1, LEAST_QUERIES, LEAST_KEYS), torch.float32
"""Heads of queries and of keys, queries, keys; their dtype."""


def test_few_kernels_serve_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN keeps a kernel for each shape."""
    shapes = set()
    multiplied = torch.ops.mkldnn._linear_pointwise

    def counted(x: torch.Tensor, weight: torch.Tensor, *others: object) -> torch.Tensor:
        shapes.add((*x.shape, *weight.shape))
        output: torch.Tensor = multiplied(x, weight, *others)
        return output

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", counted)
    for new, keys in ((1, 1), (300, 1500), (QUERIES, 3 * KEYS)):
        attend(*states(1, new, keys), SCALING)  # type: ignore[call-arg]
    assert shapes == {(QUERIES, 16, KEYS, 16), (QUERIES, KEYS, 16, KEYS)}


@pytest.mark.parametrize(
    ("sizes", "dtype", "is_faster", "takes"),
    [
        (*ONE, True, True),
        (*ONE, False, False),
        ((2, 1, LEAST_QUERIES // 2, LEAST_KEYS), torch.float32, True, True),
        ((1, 1, LEAST_QUERIES - 1, LEAST_KEYS), torch.float32, True, False),
        ((1, 1, LEAST_QUERIES, LEAST_KEYS - 1), torch.float32, True, False),
        (ONE[0], torch.bfloat16, True, False),
    ],
)
def test_who_takes_it(
    sizes: tuple[int, ...], dtype: torch.dtype, is_faster: bool, takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads that share a key head are its queries."""
    seen: list[int] = []

    def attended(query: torch.Tensor, *others: object) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(query.shape[2])
        return attend(query, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(onednn, "attends_by_onednn", lambda threads: is_faster)
    monkeypatch.setattr(log_sum_exp.onednn, "attend", attended)
    heads, kv_heads, new, keys = sizes
    query, key = torch.randn(1, heads, new, 16).to(dtype), torch.randn(1, kv_heads, keys, 16).to(dtype)
    sdpa_with_lse(query, key, key, None, SCALING)
    sdpa_with_lse(query, key, key, torch.zeros(new, keys, dtype=dtype), SCALING)
    assert seen == ([LEAST_QUERIES] if takes else [])


@pytest.mark.parametrize("encoding", ["default", "self_extend:neighbor_window=64", "alibi"])
def test_a_model_gives_its_logits(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = tiny_model("llama", max_position_embeddings=8192)
    ids = tiny_tokens(1, 4096 + LEAST_QUERIES)
    used: list[int] = []
    blocks = onednn._block
    monkeypatch.setattr(onednn, "_block", lambda *given: (used.append(1), blocks(*given))[1])

    def logits(is_faster: bool) -> torch.Tensor:
        monkeypatch.setattr(onednn, "attends_by_onednn", lambda threads: is_faster)
        with patched(model) as patch, torch.inference_mode():
            slots = patch.encoding(encoding, length=ids.shape[1])
            first = model(ids[:, :4096], use_cache=True, **slots)
            return model(ids[:, 4096:], past_key_values=first.past_key_values, **slots).logits

    plain = logits(is_faster=False)
    assert not used
    torch.testing.assert_close(logits(is_faster=True), plain, rtol=0, atol=2e-5)
    assert used or encoding == "alibi"
