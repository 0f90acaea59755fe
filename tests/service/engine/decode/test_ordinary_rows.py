"""Decoding goes to the kernel at once, with the tokens and log-probabilities of the general way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from patches import Patched, parse, patched
from patches.attention import fused
from patches.model.attention.planning import Planning
from service.engine.choice import EngineChoice
from service.engine.request import EngineRequest
from tests.models import VOCAB_SIZE, tiny_model
from tests.service.engine.adapter.test_paged_attention import LIMITS, NEW, requests_of

PROMPTS = [torch.randint(3, VOCAB_SIZE, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 9, 13)]


def generated(patch: Patched, fields: list[dict[str, Any]]) -> tuple[list[list[int]], list[EngineRequest]]:
    requests = requests_of(patch, [parse(each) for each in fields], PROMPTS[: len(fields)])
    return EngineChoice().built(patch, LIMITS).run_to_end(requests), requests


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "llama4", "gemma2"])
def test_tokens_and_logprobs_are_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields: list[dict[str, Any]] = [{"method": "default"}, {"method": "alibi"}, {"method": "default"}]
    with patched(tiny_model(family)[1]) as patch:
        tokens, requests = generated(patch, fields)
        monkeypatch.setattr(Planning, "_readings", lambda self, *_: [None] * len(self.row.new))
        expected, general = generated(patch, fields)
    assert tokens == expected
    for one, other in zip(requests, general, strict=True):
        values = [step.logprob for step in other.logprobs]
        assert [step.logprob for step in one.logprobs] == pytest.approx(values, abs=1e-5)


def test_only_layers_with_other_scores_go_the_general_way(monkeypatch: pytest.MonkeyPatch) -> None:
    general, attend = [], fused.attend

    def watched(query: torch.Tensor, *args: Any, **arguments: Any) -> torch.Tensor:
        general.append(query.shape[2])
        return attend(query, *args, **arguments)

    monkeypatch.setattr(fused, "attend", watched)
    fields: list[dict[str, Any]] = [
        {"method": "default"},
        {"method": "alibi"},
        {"method": "default", "attention_temperature": 1.5},
    ]
    for family, is_general in (("llama", 0), ("gemma2", 1)):  # Gemma 2 limits its scores
        with patched(tiny_model(family)[1]) as patch:
            general.clear()
            generated(patch, fields)
            layers = patch.model.config.num_hidden_layers
        assert general.count(1) == is_general * len(fields) * layers * (NEW - 1)
