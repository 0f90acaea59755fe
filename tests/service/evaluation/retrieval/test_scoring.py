"""Passes of passkey and needle: continuations and scores against plain transformers, and no trace of an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from patches import Patched, encode, parse, patched
from service.evaluation.scoring.token_scores import Reading
from tests.models import tiny_model, tiny_tokens
from tests.service.evaluation.prompting import ESSAY, TOKENIZER, finish


def plain_greedy(folder: Path, ids: list[int], new_tokens: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.tensor([ids])
    found = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=new_tokens, pad_token_id=1
    )
    return found[0, len(ids) :].tolist()


def read(
    patch: Patched, request: dict[str, Any], ids: list[int], answer: list[int], new_tokens: int, chunk: int
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """(log-probabilities, ranks, continuation); without an answer the first two are empty."""
    slot = patch.slots.acquire(patch.resolve(parse(request), len(ids) + new_tokens))
    reading = Reading(patch, slot)
    last = finish(reading.prefill(ids, chunk))
    scores = finish(reading.answer(last, answer, chunk)) if answer else None
    assert reading.length == len(ids)
    found = finish(reading.decode(last, new_tokens, ())).tolist()
    patch.slots.release(slot)
    return (np.array([]), np.array([]), found) if scores is None else (scores.logprobs, scores.ranks, found)


@pytest.mark.parametrize("length", [3, 40, 200])
def test_the_continuation_is_that_of_generate(checkpoints: Path, length: int) -> None:
    folder = checkpoints / "tiny"
    ids = [0, *TOKENIZER(ESSAY, add_special_tokens=False)["input_ids"][: length - 1]]
    plain = plain_greedy(folder, ids, 24)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with patched(model) as patch:
        for chunk in (16, 512):
            assert read(patch, {"method": "default"}, ids, [7, 8, 9], 24, chunk)[2] == plain
        reading = Reading(patch, 0)
        last = finish(reading.prefill(ids, 64))
        end = plain[5]
        assert finish(reading.decode(last, 24, (end,))).tolist() == plain[: plain.index(end) + 1]


@pytest.mark.parametrize("answer_tokens", [1, 2, 30])
def test_answers_are_scored_as_by_a_plain_forward(checkpoints: Path, answer_tokens: int) -> None:
    folder = checkpoints / "tiny"
    ids = TOKENIZER(ESSAY)["input_ids"][: 90 + answer_tokens]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0, 89:-1].double().log_softmax(-1).numpy()
    targets = np.array(ids[90:])
    expected = logprobs[np.arange(len(targets)), targets]
    with patched(model) as patch:
        for chunk in (16, 64):
            found, ranks, _ = read(patch, {"method": "default"}, ids[:90], ids[90:], 2, chunk)
            np.testing.assert_allclose(found, expected, atol=1e-4)
            assert ranks.tolist() == [1 + int((row > own).sum()) for row, own in zip(logprobs, expected, strict=True)]


REQUESTS = [
    {"method": "default"},
    {"method": "streaming", "sink_tokens": 2, "window": 20},
    {"method": "lm_infinite", "n_global": 4, "n_local": 16},
    {"method": "self_extend", "neighbor_window": 16},
    {"method": "dynamic", "factor": 4.0},
]


@pytest.mark.parametrize("request_fields", REQUESTS, ids=lambda fields: fields["method"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "llama4"])
def test_scoring_an_answer_leaves_no_trace(family: str, request_fields: dict[str, Any]) -> None:
    """Against a forward over everything for every token: no cache, no chunks, nothing evicted."""
    _, model = tiny_model(family)
    ids, answer = tiny_tokens(1, 100)[0].tolist(), tiny_tokens(1, 9, seed=1)[0].tolist()
    with patched(model) as patch:
        slot = patch.slots.acquire(patch.resolve(parse(request_fields), len(ids) + 12))

        def logprobs(sequence: list[int]) -> torch.Tensor:
            positions = encode(torch.arange(len(sequence)), slot)[None]
            with torch.no_grad():
                output = model(input_ids=torch.tensor([sequence]), position_ids=positions, use_cache=False)
            return output.logits[0].double().log_softmax(-1)

        rows = logprobs(ids + answer)[len(ids) - 1 : -1]
        expected = rows[torch.arange(len(answer)), torch.tensor(answer)].numpy()
        found, _, continued = read(patch, request_fields, ids, answer, 12, 32)
        np.testing.assert_allclose(found, expected, atol=2e-4)
        assert len(continued) == 12
        assert logprobs(ids + continued[:-1])[len(ids) - 1 :].argmax(-1).tolist() == continued, "greedy, by induction"
        assert read(patch, request_fields, ids, [], 12, 32)[2] == continued
