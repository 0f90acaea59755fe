"""Recommendations for checkpoints that declare a scaling: plain RoPE is compared with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.models.registry import ModelRegistry
from tests.service.evaluation.prompting import registry
from tests.service.evaluation.recommend.made_up import answered, planned, ranges_of


def declaring(checkpoint: Path, folder: Path, **fields: Any) -> Iterator[ModelRegistry]:
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256} | fields))
    yield from registry(folder)


def declaring_yarn(checkpoint: Path, folder: Path) -> Iterator[ModelRegistry]:
    scaling = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    yield from declaring(checkpoint, folder, rope_parameters=scaling)


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


@pytest.mark.parametrize("loss", [1.5, 3.0])
def test_the_own_encoding_is_the_reference_alone_where_a_system_cannot_express_it(
    checkpoints: Path, tmp_path: Path, loss: float
) -> None:
    """As of Qwen2.5-1M for llama.cpp. It was not measured within the trained length, and the judge missed it."""
    chunks = {"chunk_size": 40, "local_size": 8, "original_max_position_embeddings": 64}
    methods = [{"method": "linear", "factor": factor} for factor in (1.0, 2.0, 3.0, 4.0)]
    made_up = {"others": (3.0, 0.0), "linear(factor=1)": (2.0, 0.0)}
    for models in declaring(checkpoints / "tiny", tmp_path, dual_chunk_attention_config=chunks):
        plan = planned(models, length=64, target="llama.cpp", methods=methods)
        result, last = answered(plan, made_up, (loss, 0.0))
        own, best = result.methods[:2]
        assert (own.label, own.verdict, own.rounds) == ("default", "reference", 0)
        assert (best.verdict, best.rounds, result.answer.label) == ("recommended", 2, best.label)
        assert own.lengths[0].windows == 16, "as many as the finalists"
        assert own.lengths[0].difference == pytest.approx(loss - 2)
        assert result.answer.keeps_quality is (loss > 2)
        assert "default" not in [avoided.label for avoided in result.answer.avoid]
        words = result.words()
        assert words[0] == "For 64 tokens use linear(factor=1)."
        assert words[2].startswith("The model's own encoding has perplexity ")
        assert words[2].endswith(" there, but llama.cpp cannot express it.")
        assert last.cost.tokens == sum(unit.tokens for unit in last.units) <= plan.cost.tokens
