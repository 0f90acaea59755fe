"""Inputs of single new tokens against those that transformers makes of the same requests, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers.generation.continuous_batching.requests import FutureRequestState

from patches import parse, patched
from service.engine.adapter import decode_inputs, inputs
from service.engine.adapter.inputs import SlottedInputs
from service.engine.adapter.pages.cache import EncodingCache
from service.engine.choice import EngineChoice
from tests.methods import Fields
from tests.models import tiny_model
from tests.service.engine.adapter.test_paged_attention import WINDOWED, prompts_for
from tests.service.engine.cards.graphs import LIMITS, requests_of

ENCODINGS: list[Fields] = [*WINDOWED, {"method": "default"}, {"method": "yarn", "factor": 4.0}, {"method": "alibi"}]


def contents(written: SlottedInputs) -> list[Any]:
    """Everything that a forward gets, and that the manager reads afterwards."""
    arguments = written.get_model_kwargs()
    found = [arguments[name] for name in sorted(arguments) if name != "cache"]
    found += [written.requests_in_batch, written.req_id_to_new_token_position, written.num_request_in_batch]
    found += [written.total_seqlen_q, written.total_seqlen_k, written.true_read_sizes, written.true_write_sizes]
    return found


def copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist(), value.dtype
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    return [copied(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("attention", ["segments", "eager"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_they_are_equal(family: str, attention: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows whose pages are evicted, and for gemma3 also layers that slide."""
    steps = 0

    def both(
        written: SlottedInputs,
        cache: EncodingCache,
        requests: Sequence[FutureRequestState],
        slots: Sequence[int],
        max_kv_read: int,
        *,
        by_tables: bool,
    ) -> None:
        nonlocal steps
        steps += 1
        before = [(request.state.position_offset, request.state.tokens_to_process) for request in requests]
        sequences = [(slot, n, 1) for slot, (n, _) in zip(slots, before, strict=True)]
        written._prepare_by_theirs(written, list(requests))
        written._add_slots(written, sequences)
        expected = copied(contents(written)), [(r.state.position_offset, r.state.tokens_to_process) for r in requests]
        for request, (position, tokens) in zip(requests, before, strict=True):
            request.state.position_offset, request.state.tokens_to_process = position, tokens
        ordinary(written, cache, requests, slots, max_kv_read, by_tables=by_tables)
        after = [(request.state.position_offset, request.state.tokens_to_process) for request in requests]
        assert (copied(contents(written)), after) == expected

    ordinary = decode_inputs.prepare_decode
    monkeypatch.setattr(inputs, "prepare_decode", both)
    with patched(tiny_model(family)[1]) as patch:
        methods = [parse(fields) for fields in ENCODINGS]
        requests = requests_of(patch, methods, prompts_for(methods, 30), [30 + n for n in range(len(methods))])
        EngineChoice(attention=attention).built(patch, LIMITS).run_to_end(requests)
    assert steps > 20
