"""Recommendations for checkpoints that declare a scaling: plain RoPE is compared with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.models.registry import ModelRegistry
from tests.service.evaluation.prompting import registry
from tests.service.evaluation.recommend.made_up import answered, planned, ranges_of


def declaring_yarn(checkpoint: Path, folder: Path) -> Iterator[ModelRegistry]:
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    scaling = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    config |= {"rope_parameters": scaling, "max_position_embeddings": 256}
    (folder / "config.json").write_text(json.dumps(config))
    yield from registry(folder)


@pytest.mark.parametrize("best", ["linear(factor=1)", "rerope(base=linear:1)", "rerope"])
def test_a_declared_scaling_that_costs_quality_is_named(checkpoints: Path, tmp_path: Path, best: str) -> None:
    """Position maps were proposed over the declared scaling alone, and plain RoPE never was."""
    for models in declaring_yarn(checkpoints / "tiny", tmp_path):
        made_up = {"others": (3.0, 0.0), best: (2.0, 0.0)}
        result, _ = answered(planned(models), made_up, (2.0, 0.0))
        assert result.answer.label == best
        says = "The checkpoint declares yarn, which costs quality on this text; this answer is over plain RoPE."
        assert (says in result.words()) is ("linear" in best)


@pytest.mark.parametrize("length", [64, 256])
def test_plain_rope_serves_short_requests_if_a_declared_scaling_surely_costs_quality(
    checkpoints: Path, tmp_path: Path, length: int
) -> None:
    """The policy kept the declared scaling within the trained length, and plain RoPE was not measured there."""
    plain = {"method": "linear", "factor": 1.0}
    made_up = {"others": (4.0, 0.8), "default": (3.0, 0.8), "linear(factor=1)": (2.0, 0.8)}
    cases = {(2.5, 0.8): True, (2.05, 0.8): False, (2.5, 0.8, 2.0): False, (1.5, 0.8): False}
    for models in declaring_yarn(checkpoints / "tiny", tmp_path):
        plan = planned(models, length=length)
        for within, surely in cases.items():
            result, last = answered(plan, made_up, within)
            assert (ranges_of(result)[0]["pe"] == plain) is surely, within
            says = "There linear(factor=1), which is plain RoPE, has perplexity "
            assert any(sentence.startswith(says) for sentence in result.words()) is (surely and length > 64)
            assert last.cost.tokens <= plan.cost.tokens
            assert ranges_of(result)[-1]["up_to"] == length
        better, _ = answered(plan, made_up | {"linear(factor=1) 64": (1.5, 0.8)}, (2.5, 0.8))
        assert better.answer.keeps_quality is (length == 64), "a scaling that costs quality is no measure"
