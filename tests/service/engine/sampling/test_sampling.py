"""Drawn tokens: their distribution, what truncation leaves, and noise that no company changes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from service.engine.request import EngineRequest, SamplingParams
from service.engine.sampling import sample, undone_on_error
from service.engine.sampling.tokens import BLOCK, noise
from service.engine.sampling.truncation import _least_by_order, _least_of_top_k, _least_of_top_p


def request(**sampling: Any) -> EngineRequest:
    return EngineRequest([1], 0, None, 1, SamplingParams(**sampling))


def test_samples_follow_the_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    drawn = np.bincount([int(sample(logits, [request(temperature=0.7, seed=s)])) for s in range(2000)], minlength=4)
    expected = (logits[0] / 0.7).softmax(-1).numpy() * 2000
    chi_square = ((drawn - expected) ** 2 / expected).sum()
    assert chi_square < 16.3  # 0.1 % of the chi-square distribution with 3 degrees of freedom


def test_truncation_keeps_what_it_says() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    top_k = {int(sample(logits, [request(temperature=1.0, top_k=2, seed=s)])) for s in range(300)}
    top_p = {int(sample(logits, [request(temperature=1.0, top_p=0.7, seed=s)])) for s in range(300)}
    tiny_p = {int(sample(logits, [request(temperature=5.0, top_p=1e-9, seed=s)])) for s in range(50)}
    assert (top_k, top_p, tiny_p) == ({0, 1}, {0, 1}, {0})


def test_rows_of_cancelled_requests_are_harmless() -> None:
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    wanted = request(logprobs=2)
    tokens = sample(logits, [None, wanted, None])
    assert tokens.tolist() == logits.argmax(-1).tolist()
    entry = wanted.logprobs[0]
    assert math.isclose(entry.logprob, float(logits[1].log_softmax(-1).max()), rel_tol=1e-6)
    assert len(entry.top) == 2


def test_draws_over_many_blocks_follow_the_distribution() -> None:
    """All draws are rows of one batch; half of the tokens are impossible, some whole blocks among them."""
    vocabulary = 3 * BLOCK + 17
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(0)).mul(3)
    logits[torch.arange(vocabulary) % 2 == 0] = -torch.inf
    logits[BLOCK : 2 * BLOCK] = -torch.inf
    requests = [request(temperature=1.5, seed=seed) for seed in range(20000)]
    drawn = np.bincount(sample(logits.expand(len(requests), -1), requests).numpy(), minlength=vocabulary)
    expected = (logits / 1.5).softmax(-1).numpy() * len(requests)
    assert not drawn[expected == 0].any()
    likely = expected > 10
    chi_square = ((drawn - expected)[likely] ** 2 / expected[likely]).sum()
    degrees = likely.sum() - 1
    assert chi_square < degrees + 3.5 * math.sqrt(2 * degrees)


def test_tokens_of_one_request_are_independent() -> None:
    """Consecutive tokens of one seed fill the cells of a table evenly."""
    one, drawn = request(temperature=1.0, seed=5), []
    for index in range(4001):
        one.generated = index
        drawn.append(int(sample(torch.zeros(1, 4), [one])))
    cells = np.bincount(np.array(drawn[:-1]) * 4 + np.array(drawn[1:]), minlength=16)
    assert ((cells - 250) ** 2 / 250).sum() < 37.7  # 0.1 % of the chi-square distribution with 15 degrees of freedom


def splitmix64(state: int) -> Iterator[int]:
    """Steele et al., OOPSLA 2014, figure 17, in whole numbers."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        yield mixed(state)


def mixed(bits: int) -> int:
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
    return bits ^ bits >> 31


def test_noise_is_that_of_splitmix64() -> None:
    """A seed draws the same tokens in every release. The first numbers of seed 1234567 are published."""
    assert list(islice(splitmix64(1234567), 2)) == [6457827717110365317, 3203168211198807973]
    seeds = [0, 1, 1234567, 2**64 - 1]
    requests = [request(seed=seed) for seed in seeds]
    for index in range(5):
        for one in requests:
            one.generated = index
        expected = [next(islice(splitmix64(mixed(seed)), index, None)) for seed in seeds]
        assert noise(requests).tolist() == [(bits >> 12) / 2**52 for bits in expected]


def params() -> list[dict[str, Any]]:
    seeded = [{"temperature": t, "top_k": k, "top_p": p} for t in (0.7, 1.3) for k in (0, 40) for p in (1.0, 0.9)]
    return [{"temperature": 0.0}, *seeded, {"temperature": 1.0, "logprobs": 3}]


def test_company_changes_no_token() -> None:
    vocabulary = 5000
    logits = torch.randn(len(params()), vocabulary, generator=torch.Generator().manual_seed(1)).mul(2)
    for index in range(20):
        requests = [request(seed=row, **fields) for row, fields in enumerate(params())]
        alone = [request(seed=row, **fields) for row, fields in enumerate(params())]
        for each in (*requests, *alone):
            each.generated = index
        together = sample(logits, requests).tolist()
        assert together == [int(sample(logits[row : row + 1], [one])) for row, one in enumerate(alone)]
        assert requests[-1].logprobs == alone[-1].logprobs


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 40.0])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 0.9999999])
def test_the_last_of_top_p_is_that_of_all_weights_in_order(scale: float, top_p: float) -> None:
    """Equal weights, and weights of 0 among them."""
    weights = torch.randn(5000, generator=torch.Generator().manual_seed(3)).mul(scale)
    weights = torch.cat((weights - weights.max(), weights - weights.max(), torch.full((100,), -torch.inf))).exp()
    ordered = weights.sort(descending=True).values[None]
    expected = float(_least_by_order(ordered, torch.tensor([[top_p]], dtype=torch.float64)))
    assert _least_of_top_p(weights.numpy(), top_p) == expected


@pytest.mark.parametrize(("seed", "top_p"), [(1, 0.9999999994067046), (2930, 0.9999999999999999)])
def test_the_last_of_top_p_is_a_weight_whatever_rounding_does(seed: int, top_p: float) -> None:
    """By rounding, the sums of a block, or of all, are less than the wanted share of the sum."""
    weights = np.exp(8 * np.random.default_rng(seed).normal(size=4 * BLOCK))
    weights = (weights / weights.max()).astype(np.float32)
    last = _least_of_top_p(weights, top_p)
    assert last in weights
    assert weights[weights >= last].sum(dtype=np.float64) / weights.sum(dtype=np.float64) == pytest.approx(top_p, 1e-15)


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 40.0])
@pytest.mark.parametrize("top_k", [1, 5, 40, 300, 5000])
def test_the_last_of_top_k_is_that_of_all_weights_in_order(scale: float, top_k: int) -> None:
    """Of 40 blocks: fewer than ``top_k``, and more. Equal weights, and weights of 0 among them."""
    weights = torch.randn(5000, generator=torch.Generator().manual_seed(4)).mul(scale)
    weights = torch.cat((weights - weights.max(), weights - weights.max(), torch.full((100,), -torch.inf))).exp()
    assert _least_of_top_k(weights.numpy(), top_k) == float(weights.topk(top_k).values[-1])


@pytest.mark.parametrize("scale", [0.01, 4.0], ids=["flat", "peaked"])
def test_top_p_over_a_large_vocabulary(scale: float) -> None:
    logits = torch.randn(2048, generator=torch.Generator().manual_seed(2)).mul(scale)
    ordered, order = logits.double().softmax(-1).sort(descending=True)
    kept = set(order[ordered.cumsum(-1) - ordered < 0.8].tolist())
    assert (len(kept) > 1024) == (scale < 1)
    requests = [request(temperature=1.0, top_p=0.8, seed=seed) for seed in range(3000)]
    drawn = set(sample(logits.expand(len(requests), -1), requests).tolist())
    assert drawn <= kept
    assert len(drawn) > len(kept) / 2 or scale > 1


def test_tokens_held_back_are_never_drawn() -> None:
    logits = torch.tensor([[9.0, 1.0, 0.0]]).repeat(3, 1)
    held = [
        EngineRequest([1], 0, None, 4, SamplingParams(temperature=t, min_tokens=2, seed=3), (0,)) for t in (0.0, 2.0)
    ]
    free = EngineRequest([1], 0, None, 4, SamplingParams(), (0,))
    tokens = sample(logits, [*held, free]).tolist()
    assert 0 not in tokens[:2]
    assert tokens[2] == 0
    assert logits[0, 0] == 9.0


def test_a_failed_step_takes_its_logprobs_back() -> None:
    one, drawn = request(temperature=1.0, seed=1, logprobs=1), []

    def step() -> None:
        with undone_on_error([one, None]):
            drawn.append(int(sample(torch.zeros(1, 50), [one])))
            raise RuntimeError("later")

    with pytest.raises(RuntimeError, match="later"):
        step()
    assert one.logprobs == []
    assert drawn == [int(sample(torch.zeros(1, 50), [one]))]
