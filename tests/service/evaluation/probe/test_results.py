"""Results of the probe: attention, copying and loss by distance, against models run by hand and a copying scorer."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from patches import Patched, encode
from service.evaluation.probe import units
from service.evaluation.probe.plan import ProbePlan, plan_of
from service.evaluation.probe.request import ProbeRequest
from service.evaluation.probe.results import ProbeMethod, ProbeResult
from service.evaluation.probe.units import CopyUnit
from service.evaluation.scoring.token_scores import TokenScores
from service.evaluation.statistics.proportion import wilson
from service.evaluation.tables import csv_of
from service.evaluation.unit import Outcome, Unit, evaluate
from service.models.registry import ModelRegistry
from service.settings import Settings
from tests.service.evaluation.probe.conftest import METHODS, planned, settings_of
from tests.service.evaluation.prompting import finish


def outcomes_of(plan: ProbePlan) -> list[Outcome]:
    return [finish(unit.run()) for unit in plan.units]


def own_attentions(folder: Path, token_ids: Sequence[int]) -> np.ndarray:
    """transformers' own weights [layers, heads, length, length]."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        attentions = model(torch.tensor([token_ids]), output_attentions=True).attentions
    return np.stack([weights[0].double().numpy() for weights in attentions])


def test_attention_is_that_of_the_unpatched_model(tiny: ModelRegistry, checkpoints: Path) -> None:
    plan = planned(tiny, methods=METHODS[:1])
    method = plan.result(outcomes_of(plan)).methods[0]
    assert plan.bos == 0
    for length, mean in zip((40, 128), method.attention_mean, strict=True):
        own = [own_attentions(checkpoints / "tiny", [0, *d.token_ids[: length - 1]]) for d in plan.documents]
        rows = np.mean(own, axis=0)[:, :, -20:]  # [layers, heads, 20, length]
        apart = np.arange(length - 20, length)[:, None] - np.arange(length)
        heads = [head for head in method.attention if head.length == length]
        assert [(head.layer, head.head) for head in heads] == [(i, j) for i in range(2) for j in range(4)]
        for head in heads:
            weights = rows[head.layer, head.head]
            for bucket in head.buckets:
                inside = (apart >= bucket.start) & (apart < bucket.stop)
                assert bucket.mass == pytest.approx(np.where(inside, weights, 0).sum() / 20, abs=1e-5)
            assert head.first_keys == pytest.approx(weights[:, :4].sum() / 20, abs=1e-5)
            assert sum(bucket.mass for bucket in head.buckets) == pytest.approx(1, abs=1e-5)
        assert mean.length == length
        assert mean.first_keys == pytest.approx(rows[..., :4].sum(-1).mean(), abs=1e-5)
        assert mean.buckets[0].mass == pytest.approx(np.mean([head.buckets[0].mass for head in heads]), abs=1e-12)
        last = np.stack(own)[..., -20:, :]
        assert mean.entropy == pytest.approx(-(last * np.log(np.maximum(last, 1e-300))).sum(-1).mean(), abs=1e-4)


def test_order_of_units_and_forwards_between_chunks_do_not_matter(tiny: ModelRegistry) -> None:
    """Another request's forward runs at every yield, under another encoding."""
    expected = finish(evaluate(planned(tiny)))
    plan = planned(tiny)
    patch = plan.subjects[0].patch
    results: dict[Unit, Outcome] = {}
    for unit in reversed(plan.units):
        results[unit] = interrupted(unit, patch)
    result = plan.result([results[unit] for unit in plan.units])
    assert result.numbers() == expected.numbers()


def interrupted(unit: Unit, patch: Patched) -> Outcome:
    work, read = unit.run(), 0
    while True:
        try:
            read += next(work)
        except StopIteration as stop:
            assert unit.tokens - 1 <= read <= unit.tokens
            outcome: Outcome = stop.value
            return outcome
        with torch.no_grad():
            patch.model(torch.randint(3, 300, (2, 9)), position_ids=encode(torch.arange(9), 0)[None], use_cache=False)


def copying_scores(*given: Any, **_: Any) -> Generator[int, None, TokenScores]:
    """A scorer that expects after a token what followed its first occurrence, and elsewhere is wrong."""
    token_ids: Sequence[int] = given[1]
    scores = TokenScores.empty(len(token_ids) - 1, 0)
    first: dict[int, int] = {}
    for i, token in enumerate(token_ids[:-1]):
        known = first.setdefault(token, i)
        right = known < i and token_ids[known + 1] == token_ids[i + 1]
        scores.ranks[i], scores.logprobs[i] = (1, -0.25) if right else (2, -4.0)
    yield len(token_ids) - 1
    return scores


@pytest.mark.parametrize("bos", ["auto", "never"])
def test_a_model_that_copies_scores_one(tiny: ModelRegistry, monkeypatch: pytest.MonkeyPatch, bos: str) -> None:
    monkeypatch.setattr(units, "token_scores", copying_scores)
    plan = planned(tiny, methods=METHODS[:1], bos=bos)
    result = plan.result(outcomes_of(plan))
    assert [at.distance for at in result.methods[0].copying] == [12, 50]
    for at in result.methods[0].copying:
        assert (at.accuracy, at.nll_mean, at.tokens) == (1.0, 0.25, 3 * 5)
        assert (at.accuracy_first, at.nll_first) == (0.0, 4.0)
        assert (at.interval.low, at.interval.high, at.interval.kind) == (wilson(15, 15).low, 1.0, "samples")


def test_copying_is_scored_as_by_one_plain_pass(tiny: ModelRegistry, checkpoints: Path) -> None:
    plan = planned(tiny, methods=METHODS[:1])
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "tiny", dtype=torch.float32)
    for unit in plan.units:
        if isinstance(unit, CopyUnit):
            outcome, ids = finish(unit.run()), torch.tensor(unit.token_ids)
            with torch.no_grad():
                logprobs = model(ids[None]).logits[0].log_softmax(-1).double()
            for name, last in (("", len(ids)), ("_first", 7)):
                own = torch.stack([logprobs[i - 1, ids[i]] for i in range(last - 5, last)])
                ranks = [1 + int((logprobs[i - 1] > logprobs[i - 1, ids[i]]).sum()) for i in range(last - 5, last)]
                np.testing.assert_allclose(outcome[f"nll{name}"], -own.numpy(), atol=1e-4)
                assert outcome[f"ranks{name}"].tolist() == ranks


def test_loss_by_position_is_that_of_the_unpatched_model(tiny: ModelRegistry, checkpoints: Path) -> None:
    plan = planned(tiny, methods=METHODS[:1])
    buckets = plan.result(outcomes_of(plan)).methods[0].nll_by_position
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "tiny", dtype=torch.float32)
    nll = []
    for document in plan.documents:
        ids = torch.tensor([0, *document.token_ids[:127]])
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0].log_softmax(-1)
        nll.append([-float(logprobs[i, ids[i + 1]]) for i in range(127)])
    assert [(b.start, b.stop, b.tokens) for b in buckets] == [(0, 16, 30), (16, 32, 32), (32, 64, 64), (64, 128, 128)]
    for bucket in buckets:
        inside = [value for row in nll for context, value in enumerate(row, 1) if bucket.start <= context < bucket.stop]
        assert bucket.nll_mean == pytest.approx(np.mean(inside), rel=1e-4)


def test_rows_are_one_long_table(tiny: ModelRegistry) -> None:
    plan = planned(tiny)
    result = plan.result(outcomes_of(plan))
    rows = result.rows()
    assert {tuple(row) for row in rows} == {tuple(rows[0])}
    assert {row["trained_length"] for row in rows} == {64}
    count = {measure: sum(row["measure"] == measure for row in rows) for measure in {row["measure"] for row in rows}}
    by_head = 3 * 9  # methods, 2 layers of 4 heads and their mean
    assert count == {
        "attention": by_head * (7 + 8),  # buckets up to 40 and up to 128
        "first_keys": by_head * 2,
        "entropy": by_head * 2,
        **dict.fromkeys(("copying", "copying_first", "copying_nll", "copying_nll_first"), 3 * 2),
        "nll": 3 * 4,
    }
    masses: dict[tuple[object, ...], float] = {}
    for row in rows:
        if row["measure"] == "attention":
            key = tuple(row[name] for name in ("method", "length", "layer", "head"))
            masses[key] = masses.get(key, 0.0) + float(row["value"] or 0)
    assert len(masses) == by_head * 2
    assert all(total == pytest.approx(1, abs=1e-5) for total in masses.values())
    assert len(csv_of(result).splitlines()) == len(rows) + 1
    assert ProbeResult.model_validate_json(result.model_dump_json()) == result


def within(method: ProbeMethod, length: int, distance: int) -> float:
    """Mean mass at distances below ``distance`` (a power of two) of passes of ``length``."""
    mean = next(mean for mean in method.attention_mean if mean.length == length)
    return sum(bucket.mass for bucket in mean.buckets if bucket.stop <= distance)


@pytest.mark.slow
def test_the_example_shows_plain_rope_losing_what_is_near() -> None:
    """The embedded demo models, trained at 256 tokens: at 1024, plain RoPE attends to untrained distances."""
    models = ModelRegistry(settings_of("demo"))
    try:
        body = {**ProbeRequest.example(), "distances": [16]}
        result = finish(evaluate(plan_of(ProbeRequest(**body), models, Settings(_env_file=None))))
    finally:
        models.close()
    plain, extended, biased = result.methods
    assert (plain.model, biased.model) == ("ropeway-demo", "ropeway-demo-alibi")
    assert within(plain, 256, 128) > 0.5
    assert within(plain, 1024, 256) < 0.4
    assert within(extended, 1024, 256) > within(plain, 1024, 256) + 0.2
    assert within(biased, 1024, 256) > 0.6, "a bias keeps attention near"
    assert extended.nll_by_position[-1].nll_mean < plain.nll_by_position[-1].nll_mean - 0.3
    # It predicts text, far above one token of 2048 drawn at random.
    assert plain.copying[0].interval.low > 10 / 2048


@pytest.mark.slow
def test_a_trained_model_copies_what_is_near(shared: Path) -> None:
    """stories260K, trained at 512 tokens, repeats text a little better than it predicts it; far beyond, it is lost."""
    text = (shared / "data" / "corpora" / "tinystories.txt").read_text(encoding="utf-8")[:30_000]
    models = ModelRegistry(settings_of(str(shared / "data" / "models" / "stories260K")))
    body = {"input": text, "lengths": [64], "distances": [32, 3000], "segment": 32, "segment_of": "document"}
    try:
        plan = plan_of(ProbeRequest(**body, samples=2), models, Settings(_env_file=None))
        near, far = finish(evaluate(plan)).methods[0].copying
    finally:
        models.close()
    assert near.accuracy > near.accuracy_first + 0.02
    assert near.nll_mean < near.nll_first - 0.1
    assert far.nll_mean > near.nll_mean + 1
    assert far.accuracy < near.accuracy - 0.1
