"""Phi-MoE: its rotary module applies factors of its configuration to cos and sin, short or long by the length.

transformers computes its frequencies without a length, so the list for short texts serves long ones too.
microsoft/Phi-3.5-MoE-instruct.
"""

from __future__ import annotations

from typing import Any

from patches.encoding.schedule import RopeType
from patches.model.architectures.architecture import Architecture


def facts(config: Any) -> dict[str, Any]:
    """The native encoding of a scaled checkpoint. No method has such factors but LongRoPE, so others are refused."""
    parameters = config.rope_parameters
    if parameters["rope_type"] == RopeType.DEFAULT:
        return {}
    if parameters["rope_type"] != RopeType.LONGROPE:
        return {"native": dict(parameters)}
    unused = {"type", "factor", "attention_factor"}
    native = {name: value for name, value in parameters.items() if name not in unused and value is not None}
    return {"native": {**native, "long_factor": parameters["short_factor"]}}


PHIMOE = Architecture(facts=facts)
