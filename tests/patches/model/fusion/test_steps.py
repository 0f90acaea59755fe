"""The engine with fused operations, on a GPU or under Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from patches import parse, patched
from patches.model import hf
from patches.model.fusion import launch
from service.engine.choice import EngineChoice
from tests.kernels import device_of_kernels
from tests.models import tiny_model
from tests.service.engine.adapter.test_paged_attention import SEGMENTS, generated

pytestmark = [pytest.mark.slow, pytest.mark.gpu]
DEVICE = device_of_kernels()
TRITON = EngineChoice(attention="triton")

METHODS = [parse({"method": "default"}), parse({"method": "yarn", "factor": 4.0})]
PROMPTS = [[5, 9, 7, 30, 8], [8, 3, 11]]

OPERATIONS = ("rms_norm", "added_norm", "rotate", "gated")
FUSED: dict[str, set[str]] = {
    "llama": set(OPERATIONS),
    "gemma3": set(OPERATIONS),
    "gpt_oss": {"rms_norm", "rotate"},
    "deepseek_v3": {"rms_norm", "added_norm", "gated"},  # its rotation interleaves
    "bloom": set(),
}


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Launches of each operation that a kernel has taken."""
    calls: Counter[str] = Counter()

    def counted(name: str) -> Any:
        function = getattr(launch, name)

        def count(*args: Any) -> Any:
            result = function(*args)
            calls[name] += result is not None
            return result

        return count

    for name in OPERATIONS:
        monkeypatch.setattr(launch, name, counted(name))
    return calls


@pytest.mark.parametrize("family", FUSED)
def test_a_step_has_the_same_tokens(family: str, computed: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family)[1].to(DEVICE)
    methods = METHODS if family != "bloom" else METHODS[:1] * 2
    with patched(model) as patch:
        expected, expected_values, _ = generated(patch, SEGMENTS, methods, PROMPTS)
        assert computed == {}, "only on the Triton kernel"
        tokens, values, _ = generated(patch, TRITON, methods, PROMPTS)
    assert tokens == expected
    assert torch.allclose(values, expected_values, atol=1e-3)
    assert {name for name, count in computed.items() if count} == FUSED[family]
    monkeypatch.setattr(hf, "runs_triton", lambda device: False)
    fused = computed.copy()
    with patched(model) as patch:
        assert generated(patch, TRITON, methods, PROMPTS)[0] == tokens
    assert computed == fused


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_alike(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")[1].to(DEVICE, dtype)
    with patched(model) as patch:
        tokens, values, _ = generated(patch, TRITON, METHODS, PROMPTS)
    monkeypatch.setattr(hf, "runs_triton", lambda device: False)
    with patched(model) as patch:
        expected, expected_values, _ = generated(patch, TRITON, METHODS, PROMPTS)
    assert tokens == expected
    assert torch.allclose(values, expected_values, atol=0.02 if dtype == torch.float16 else 0.1)
