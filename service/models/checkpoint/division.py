"""Weights divided among the ranks of a tensor-parallel group."""

from __future__ import annotations

import math
from typing import Any

from transformers.distributed.configuration_utils import DistributedConfig

WRONGLY_DIVIDED = {"hrm_text", "youtu"}
"""Types whose weights transformers 5.24 loads wrong under its own plan, as ``python -m tests.field.parallel`` found."""


def arguments_of(config: Any, ranks: int) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` for one of so many ranks, which loads its part of the weights.

    Raises:
        ValueError: when the model cannot be divided by the number of ranks.
    """
    if ranks == 1:
        return {}
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"quantized weights are not divided: ROPEWAY_TENSOR_PARALLEL={ranks}")
    heads = _heads(config.get_text_config())
    for name, number in heads.items():
        if number % ranks:
            most = math.gcd(*heads.values())
            allowed = ", ".join(str(number) for number in range(1, most + 1) if most % number == 0)
            raise ValueError(
                f"{name} {number} is no multiple of ROPEWAY_TENSOR_PARALLEL={ranks}: allowed are {allowed}"
            )
    if not has_plan(config):
        raise ValueError(f"transformers has no plan that divides a {config.model_type} among ranks")
    return {"distributed_config": DistributedConfig(tp_size=ranks)}


def _heads(text: Any) -> dict[str, int]:
    """Numbers of heads that all layers share, by their names in the configuration."""
    found = {}
    for name in ("num_attention_heads", "num_key_value_heads"):
        try:
            number = getattr(text, name, None)
        except RuntimeError:  # transformers names no number for layers that differ
            continue
        if isinstance(number, int):
            found[name] = number
    return found


def has_plan(config: Any) -> bool:
    """True if transformers knows how to divide the layers."""
    if config.model_type in WRONGLY_DIVIDED:
        return False
    return bool(getattr(config.get_text_config(), "base_model_tp_plan", None))
