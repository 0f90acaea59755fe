"""Types that rotate in some layers only, and in none where the configuration says so: such a checkpoint is NoPE."""

from __future__ import annotations

from typing import Any

from patches.model.architectures.architecture import Architecture


def _slides(config: Any) -> bool:
    """Layers without a window rotate nothing (Cohere 2, AFMoE)."""
    return "sliding_attention" in config.layer_types


def _slides_or_has_no_window(config: Any) -> bool:
    """EXAONE 4: without any window, every layer rotates."""
    return config.sliding_window is None or _slides(config)


def _rotates_somewhere(config: Any) -> bool:
    """SmolLM3: an entry of ``no_rope_layers`` is 1 for a layer that rotates."""
    return any(config.no_rope_layers)


def _native(*, rotates: bool) -> dict[str, Any]:
    return {} if rotates else {"native": {"method": "none"}}


SLIDING = Architecture(rotates=_slides, facts=lambda config: _native(rotates=_slides(config)))
EXAONE = Architecture(
    rotates=_slides_or_has_no_window, facts=lambda config: _native(rotates=_slides_or_has_no_window(config))
)
SMOLLM3 = Architecture(rotates=_rotates_somewhere, facts=lambda config: _native(rotates=_rotates_somewhere(config)))
