"""The engine on odd shapes of attention: head sizes of published models, few keys for many heads, latent attention."""

from __future__ import annotations

from typing import Any

import pytest

from patches import patched
from service.engine.choice import PAGED, EngineChoice
from service.engine.verification import verify
from tests.field import configurations
from tests.models import tiny_model
from tests.service.engine.adapter.test_architectures import METHODS, check

CHOICES = [PAGED, EngineChoice(attention="eager")]
_LATENT = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
SHAPES: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "80, a quarter rotates (Pythia 2.8B)": ("gpt_neox", {"hidden_size": 320}, 80, 20),
    "80, two fifths rotate (Phi-2)": ("phi", {"hidden_size": 320, "partial_rotary_factor": 0.4}, 80, 32),
    "96 (Phi-3 mini)": ("phi3", {"hidden_size": 384}, 96, 96),
    "112, wider than the hidden states": ("llama", {"head_dim": 112}, 112, 112),
    "192, latent (DeepSeek-V3)": ("deepseek_v3", _LATENT, 192, 64),
    "256, one key (Gemma 2B)": ("gemma", {"head_dim": 256, "num_key_value_heads": 1}, 256, 256),
    "16, six heads and two keys": ("llama", {"hidden_size": 96, "num_attention_heads": 6}, 16, 16),
    "16, six heads and one key": (
        "llama",
        {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1},
        16,
        16,
    ),
    "18, nine pairs": ("llama", {"head_dim": 18}, 18, 18),
}
"""Head size -> family, sizes of its configuration, numbers of a head and those that rotate."""


@pytest.mark.parametrize(
    ("family", "sizes", "head_dim", "rotary_dim"),
    [pytest.param(*case, id=name, marks=[] if "Gemma" in name else pytest.mark.slow) for name, case in SHAPES.items()],
)
async def test_odd_shapes(family: str, sizes: dict[str, Any], head_dim: int, rotary_dim: int) -> None:
    """Four encodings in one batch equal greedy decoding without a cache, and each route passes its verification."""
    model = tiny_model(family, **sizes)[1]
    with patched(model) as patch:
        assert (patch.geometry.head_dim, patch.geometry.rotary_dim) == (head_dim, rotary_dim)
        assert verify(patch) == PAGED
    await check(model, METHODS)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize(
    ("name", "row", "expanded"), [("mimo_v2_flash", 96, 96), ("gemma4_text (keys as values)", 32, 128)]
)
async def test_layers_with_other_numbers_of_heads(name: str, row: int, expanded: int, choice: EngineChoice) -> None:
    """As in MiMo-V2-Flash, and Gemma 4 26B and 31B: some layers have fewer keys, which may be wider."""
    family, sizes = configurations.VARIANTS.get(name, (name, {}))
    model = configurations.tiny_model(family, **sizes)
    with patched(model) as patch:
        assert (patch.cached.numbers, patch.cached.expanded, patch.cached.alike) == (row, expanded, False)
        assert verify(patch, choice.attention) == choice
    await check(model, METHODS, choice)


async def test_other_numbers_of_heads_in_layers_that_attend_to_everything() -> None:
    """Their keys are read from copies: no layer of another size lies head by head."""
    await check(tiny_model("llama")[1], METHODS, alike=False)


@pytest.mark.slow
async def test_a_window_without_effect_cuts_no_cache() -> None:
    """Moshi's configuration has a window that its attention never gets; prompts are longer than it."""
    model = configurations.tiny_model("moshi", sliding_window=8)
    with patched(model) as patch:
        assert not patch.windowed
    await check(model, METHODS)
