"""Measurement of caches: a second chunk goes on with the state of the first, or drops it."""

from __future__ import annotations

import pytest
import torch

from patches import patched
from patches.model.measuring.continuation import continues
from tests.field.configurations import VOCAB_SIZE, tiny_model


@pytest.mark.parametrize("kind", ["jamba", "zamba"])
def test_a_selective_scan_drops_its_state(kind: str) -> None:
    assert not continues(tiny_model(kind), VOCAB_SIZE)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bamba", "nemotron_h", "qwen3_next", "minimax"])
def test_other_layers_go_on(kind: str) -> None:
    assert continues(tiny_model(kind), VOCAB_SIZE)


def test_it_is_measured_once_and_unseen() -> None:
    seen: list[object] = []
    with patched(tiny_model("llama")) as patch:
        with patch.observing(seen.append):
            assert patch.continues
            assert seen == []
            patch.model(torch.tensor([[3, 4]]))
        calls: list[object] = []
        patch.model.register_forward_pre_hook(lambda *_: calls.append(1))
        assert patch.continues
    assert len(seen) == 2, "one for each layer"
    assert calls == []
