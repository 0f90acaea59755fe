"""The language model of a checkpoint that also takes images, video or sound: served prompts are text.

transformers builds the language model alone for some of these types (Llama 4, Qwen3.5). For the others it builds the
whole model, and the parts that no text reaches are dropped.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)


def class_for(config: PreTrainedConfig) -> Any:
    """The auto class that loads the language model of this type.

    Raises:
        ValueError: when transformers has no language model of this type.
    """
    kind = type(config)
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    raise ValueError(
        f"transformers {transformers.__version__} has no language model of model_type {config.model_type!r}, "
        "and custom code of a checkpoint is not run"
    )


@torch.no_grad()
def forward(model: PreTrainedModel) -> torch.Tensor:
    """Logits of one token, (1, 1, vocabulary)."""
    logits: torch.Tensor = model(torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False).logits
    return logits


def drop_other_parts(model: PreTrainedModel) -> list[str]:
    """Free the parts beside the language model; returns their names. A model of text alone has none."""
    if model.config.get_text_config() is model.config:
        return []
    base, decoder = model.base_model, model.get_decoder()
    others = [name for name, part in base.named_children() if all(inside is not decoder for inside in part.modules())]
    if decoder is base or len(others) == len(list(base.children())):
        return []
    for name in others:
        setattr(base, name, None)
    return others
