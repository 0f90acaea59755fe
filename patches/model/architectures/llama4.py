"""Llama 4: layers without rotation scale their queries by the number of tokens that their cache has seen.

Padding counts too, and in a packed row the earlier sequences. While patched, the scale follows the positions of each
sequence instead. meta-llama/llama4; arXiv:2501.19399.
"""

from __future__ import annotations

from torch import nn

from patches.encoding.temperature import FloorLogTemperature
from patches.model.architectures.architecture import Architecture, Replaced


def temperature(module: nn.Module) -> Replaced | None:
    """None for layers without a temperature."""
    if getattr(module, "use_rope", True) or not getattr(module, "attn_temperature_tuning", False):
        return None
    strength, step = float(module.attn_scale), int(module.floor_scale)  # type: ignore[arg-type]
    return Replaced("attn_temperature_tuning", False, FloorLogTemperature(strength, step, offset=1))


LLAMA4 = Architecture(temperature=temperature)
