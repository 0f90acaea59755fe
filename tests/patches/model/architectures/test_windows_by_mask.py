"""Layers that know their sliding window by the mask alone: they hand no window to their attention (Phi-MoE)."""

from __future__ import annotations

from typing import Any

import pytest

from patches import patched
from tests.field.configurations import tiny_model
from tests.models import WINDOW
from tests.patches.model.architectures.checks import equals_reference, equals_transformers
from tests.service.engine.adapter.test_architectures import METHODS, check

LAYERS = ["sliding_attention", "full_attention"]
WINDOWED: dict[str, dict[str, Any]] = {
    "phimoe": {"sliding_window": WINDOW},
    "qwen2_moe": {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": LAYERS},
}

_GIVEN = {"sliding_window": WINDOW}
_USED = {**_GIVEN, "use_sliding_window": True, "max_window_layers": 1, "layer_types": None}
_TYPED = {**_GIVEN, "layer_types": LAYERS}
SET: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("dots1", "laguna", "mellum"), _TYPED),
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe", "smollm3"), _USED),
    **dict.fromkeys(("ministral3", "mixtral", "phi3", "phi4_multimodal", "starcoder2"), _GIVEN),
    "minimax": _GIVEN,
}
"""Types whose default configuration has no window, or no layer with it."""


@pytest.mark.parametrize("kind", SET)
def test_a_window_that_a_configuration_may_have_is_kept(kind: str) -> None:
    model = tiny_model(kind, **SET[kind])
    with patched(model) as patch:
        assert set(patch.windowed.values()) == {WINDOW}
        assert patch.geometry.window in (WINDOW, None)
        assert (patch.geometry.window is None) is (len(patch.windowed) < len(patch.roles))
    equals_transformers(model)


@pytest.mark.parametrize(("kind", "layers"), [("phimoe", (0, 1)), ("qwen2_moe", (0,))])
def test_the_window_is_found_and_kept(kind: str, layers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(kind, **WINDOWED[kind])
    with patched(model) as patch:
        assert patch.windowed == dict.fromkeys(layers, WINDOW)
        assert patch.smallest_window == WINDOW
    equals_transformers(model)
    equals_reference(model, ("self_extend", "yarn", "alibi"), monkeypatch)


@pytest.mark.parametrize("kind", WINDOWED)
async def test_the_engine_keeps_it(kind: str) -> None:
    await check(tiny_model(kind, **WINDOWED[kind]), METHODS)
