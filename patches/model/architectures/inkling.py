"""Inkling: layers without a window scale their scores by the number of tokens that their cache has seen.

Padding counts too. While patched, the scale follows the positions of each sequence instead. transformers 5.24 reads
``is_sliding`` in a forward for this scale only.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from patches.encoding.temperature import LogRatioTemperature
from patches.model.architectures.architecture import Architecture, Replaced, never


def temperature(module: nn.Module) -> Replaced | None:
    """None for layers without a temperature."""
    config: Any = getattr(module, "config", None)
    floor = getattr(config, "log_scaling_n_floor", None)
    if getattr(module, "is_sliding", True) or floor is None:
        return None
    return Replaced("is_sliding", True, LogRatioTemperature(float(config.log_scaling_alpha), int(floor)))


def facts(config: Any) -> dict[str, Any]:
    """Its learned logits of distances remain under every encoding."""
    return {"native": {"method": "none"}}


INKLING = Architecture(facts=facts, rotates=never, temperature=temperature)
