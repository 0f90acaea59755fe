"""Plans of searches: windows, stages, costs, and requests that cannot be run."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from pydantic import ValidationError

from patches import label_of
from service.evaluation.checks import InvalidEvaluation
from service.evaluation.documents import from_token_ids
from service.evaluation.search.evolution import Individual
from service.evaluation.search.places import split
from service.evaluation.search.plan import plan_of
from service.evaluation.search.request import SearchRequest
from service.evaluation.search.unit import LateUnit
from service.evaluation.unit import evaluate, run_units
from service.models.registry import ModelRegistry
from tests.service.conftest import TEXT, tiny_tokenizer
from tests.service.evaluation.prompting import finish, settings_of
from tests.service.evaluation.search.made_up import LENGTH, SMALL, answered, planned

SHORT_LISTS = {"method": "longrope", "short_factor": [1.0], "long_factor": [2.0]}


def test_progress_counts_each_unit_whole(models: ModelRegistry) -> None:
    """No forward reads the last token of a window, which is only a target."""
    units = planned(models).units[:3]
    done = [progress.tokens_done for progress in run_units(units)]
    assert {LENGTH, 2 * LENGTH, 3 * LENGTH} <= set(done)
    assert done == sorted(set(done))


def test_the_last_half_of_a_window_is_scored(models: ModelRegistry) -> None:
    unit = planned(models).units[-1]
    assert isinstance(unit, LateUnit)
    ids = unit.token_ids
    assert len(ids) == unit.tokens == LENGTH
    assert ids[-1] == unit.document.token_ids[unit.stop - 1]
    outcome = finish(unit.run())
    with torch.no_grad(), unit.slot() as slot:
        positions = torch.arange(len(ids)) + (slot << 24)
        logits = unit.subject.patch.model(input_ids=torch.tensor([ids]), position_ids=positions[None]).logits[0]
    own = logits.log_softmax(-1)[torch.arange(LENGTH - 1), torch.tensor(ids[1:])]
    np.testing.assert_allclose(outcome["nll"], [-own[-LENGTH // 2 :].mean()], rtol=1e-4)


@pytest.mark.parametrize(("tokens", "length"), list(product(([900], [130, 400, 200], [2000, 64], [65] * 20), (64, 65))))
def test_no_held_out_window_has_a_token_of_the_search(tokens: list[int], length: int) -> None:
    documents = [from_token_ids(str(n), [7] * count, tiny_tokenizer()) for n, count in enumerate(tokens)]
    for seed in range(5):
        for places in (halves := split(documents, length, (length + 1) // 2, (2, 4), seed)):
            assert len(set(places.windows)) == len(places.windows)
        search, held_out = (
            {(p.document, t) for p in half.windows for t in range(p.stop - length, p.stop)} for half in halves
        )
        assert not search & held_out
        assert [len(half.windows) for half in halves] == [2, 4]


def test_text_without_room_is_refused_and_the_least_that_suffices_is_not() -> None:
    def halves(tokens: int) -> Any:
        return split([from_token_ids("a", [7] * tokens, tiny_tokenizer())], 64, 32, (2, 4), 0)

    with pytest.raises(InvalidEvaluation, match="input: 2 windows and 4 held-out ones need 256 tokens: send more"):
        halves(255)
    assert [len(half.windows) for half in halves(256)] == [2, 4]
    documents = [from_token_ids(name, [7] * 100, tiny_tokenizer()) for name in "ab"]
    with pytest.raises(InvalidEvaluation, match="need 256 tokens of one document: send more"):
        split(documents, 64, 32, (2, 4), 0)


def test_a_window_of_each_document_is_enough() -> None:
    documents = [from_token_ids(f"{index}", [index] * 64, tiny_tokenizer()) for index in range(12)]
    search, held_out = split(documents, 64, 32, (4, 8), 0)
    assert sorted(place.document for half in (search, held_out) for place in half.windows) == list(range(12))
    with pytest.raises(InvalidEvaluation, match="need 480 tokens of one document: send more text"):
        split(documents, 64, 32, (4, 9), 0)


@pytest.mark.parametrize("sizes", [(1000,), (700, 400), (300, 300, 300), (1000, 100)])
def test_the_length_by_default_has_room_for_all_windows(models: ModelRegistry, sizes: tuple[int, ...]) -> None:
    documents = [[5 + index] * size for index, size in enumerate(sizes)]
    plan = planned(models, length=None, input=documents, held_out=8)
    assert 64 < plan.target < 4 * 64
    assert (len(plan.places.windows), len(plan.held_out.windows)) == (2, 8)
    with pytest.raises(InvalidEvaluation, match="input: 2 windows and 90 held-out ones beyond the trained length, 64"):
        planned(models, length=None, input=documents, held_out=90)


def test_documents_that_repeat_one_another_bring_a_caution(models: ModelRegistry) -> None:
    text = TEXT[:3000]
    result, _ = answered(planned(models, length=128, input=[text, f"Hello. {text}"]), lambda unit: 2.0)
    assert "So held-out windows may repeat text that the search has read." in result.answer.words
    result, _ = answered(planned(models), lambda unit: 2.0)
    assert not [word for word in result.answer.words if "may repeat" in word]


def test_stages_are_generations_and_then_the_held_out_windows(models: ModelRegistry) -> None:
    plan = planned(models)
    assert [subject.label for subject in plan.compared] == [
        "default",
        "linear(factor=2)",
        "ntk(factor=2)",
        "yarn(factor=2)",
    ]
    result, last = answered(plan)
    assert [generation.candidates for generation in result.generations] == [8, 4, 4]
    windows = {unit.stop for unit in plan.units}
    assert windows == {place.stop for place in plan.places.windows}
    labels = [unit.subject.label for unit in last.units[len(last.units) - 5 * 3 :: 3]]  # type: ignore[attr-defined]
    assert labels[1:] == [subject.label for subject in plan.compared]
    assert labels[0].startswith("longrope(")
    assert result.tokens_read == last.tokens == plan.tokens == LENGTH * ((4 + 16) * 2 + 5 * 3)


def test_the_search_begins_with_its_methods_as_they_are(models: ModelRegistry) -> None:
    """With their own factors on cos and sin; that of LongRoPE's formula may follow."""
    plan, patch = planned(models), models.default.patch
    starts = [subject.method for subject in plan.compared[1:]]
    own = [patch.resolve(method, LENGTH) for method in starts]
    begun = [patch.resolve(plan._subject(one).method, LENGTH) for one in plan.bred[0][: len(starts)]]
    assert (
        [one.attention_factor for one in begun]
        == [one.attention_factor for one in own]
        == [1, 1, own[2].attention_factor]
    )
    for found, expected in zip(begun, own, strict=True):
        np.testing.assert_allclose(found.inv_freq, expected.inv_freq, rtol=0.006)
    formula = math.sqrt(1 + math.log(2) / math.log(64))
    assert plan.space.attention == pytest.approx((1, own[2].attention_factor, formula))


def test_the_factor_on_attention_is_found_too(models: ModelRegistry) -> None:
    """It counts alone here: candidates without it lose."""
    plan = planned(models, population=16, generations=6)
    for wanted in plan.space.attention:

        def loss(unit: LateUnit, wanted: float = wanted) -> float:
            return 2.0 + abs(unit.resolved.attention_factor - wanted)

        result, _ = answered(plan, loss)
        assert result.pe["attention_factor"] == wanted
        said = " ".join(result.words())
        assert f"and {wanted:.4g} on cos and sin." in said
        assert ("Up to the trained length, it is plain RoPE." in said) == (wanted == 1)


def test_the_cost_is_a_bound(models: ModelRegistry) -> None:
    """A search that finds no new factors ends with fewer tokens than its plan has."""
    plan = planned(models, generations=40)
    alone = Individual((100,) * plan.space.pairs, 1.0)
    narrow = replace(plan, space=replace(plan.space, most=100, attention=(1.0,)), bred=((alone,),))
    _, last = answered(narrow)
    assert len(last.bred) == 1
    assert last.tokens < plan.tokens


def test_it_finds_better_factors_than_it_began_with(models: ModelRegistry) -> None:
    result, _ = answered(planned(models, length=256, generations=12, population=24))
    found, *others = result.methods
    assert found.search_loss == min(generation.best for generation in result.generations)
    assert result.generations[-1].best < result.generations[0].best
    assert all(found.search_loss < other.search_loss for other in others)
    assert result.answer.label == "search"
    assert result.answer.pe == result.pe == found.request
    assert found.factors == pytest.approx(result.pe["long_factor"])


def test_equal_requests_have_equal_results(models: ModelRegistry) -> None:
    results = [finish(evaluate(planned(models, seed=seed))).numbers() for seed in (1, 1, 2)]
    assert results[0] == results[1]
    assert results[0]["pe"] != results[2]["pe"]


def test_methods_are_compared_in_place_of_those_that_begin_the_search(models: ModelRegistry) -> None:
    result, plan = answered(planned(models, methods=["self_extend:4", "yarn:4", "default"]), lambda unit: 2.0)
    assert [method.label for method in result.methods] == [
        "search",
        "default",
        *map(label_of, [s.method for s in plan.compared[1:]]),
    ]
    assert [method.factors is None for method in result.methods] == [False, False, True, False]
    assert planned(models, methods=["yarn:4"]).bred == planned(models).bred


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"length": 64}, "length", "must be beyond the trained length, 64, not 64"),
        ({"length": 1 << 20}, "length", "is beyond the shortest document"),
        ({"held_out": 1000}, "input", "2 windows and 1000 held-out ones need 64255 tokens"),
        ({"methods": ["yarn:4", SHORT_LISTS]}, "methods.1", "this model has . rotary pairs"),
    ],
)
def test_a_request_that_cannot_be_run_is_refused(
    models: ModelRegistry, fields: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(InvalidEvaluation, match=message) as refused:
        planned(models, **fields)
    assert refused.value.param == param


def test_a_search_beyond_the_budget_is_refused_by_its_bound(models: ModelRegistry) -> None:
    plan = planned(models)
    request = plan.request
    for most, fits in ((plan.tokens, True), (plan.tokens - 1, False)):
        settings = settings_of(Path("tiny"), max_scored_tokens=most)
        if fits:
            assert plan_of(request, models, settings).tokens == most
            continue
        with pytest.raises(InvalidEvaluation, match=f"length: this takes {plan.tokens} tokens"):
            plan_of(request, models, settings)


@pytest.mark.parametrize(
    ("geometry", "message"),
    [
        ({"family": "none"}, "model: has no factors to search: "),
        ({"family": "bias"}, "model: has no factors to search: "),
        ({"rotary_dim": 2}, "model: has no factors to search: it needs 2 rotary pairs and has 1"),
    ],
)
def test_a_model_without_factors_is_refused(
    models: ModelRegistry, monkeypatch: pytest.MonkeyPatch, geometry: dict[str, Any], message: str
) -> None:
    patch = models.default.patch
    monkeypatch.setattr(patch, "geometry", replace(patch.geometry, **geometry))
    with pytest.raises(InvalidEvaluation, match=message):
        planned(models)


def test_lengths_have_no_effect_and_are_refused(client: httpx.Client) -> None:
    with pytest.raises(ValidationError, match="a search is for one length"):
        SearchRequest.model_validate({"lengths": [128]})
    reply = client.post("/search", json={"lengths": [128]})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "lengths")


def test_the_encoding_works_in_every_route(client: httpx.Client) -> None:
    reply = client.post("/search", json={"input": TEXT, "length": LENGTH, **SMALL})
    assert reply.status_code == 200, reply.text
    pe = reply.json()["pe"]
    answer = client.post("/generate", json={"prompt": "The", "pe": pe, "max_new_tokens": 2})
    assert answer.status_code == 200, answer.text
    exported = client.post("/export", json={"pe": pe, "target": "transformers", "length": LENGTH})
    assert exported.status_code == 200, exported.text
    parameters = exported.json()["config"]["rope_parameters"]
    assert pe["long_factor"] == parameters["long_factor"]
    assert (
        pe["attention_factor"]
        == parameters["attention_factor"]
        == answer.json()["results"][0]["pe"]["attention_factor"]
    )
