"""The demo models with one layer: tests of commands and of the page need their names, not their knowledge."""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM

from service.models.checkpoint.loading import DEMO


def small_demo(folder: Path) -> Path:
    """A folder of the demo models with their names, tokenizers and trained length. A token is a tenth of the work."""
    for model in DEMO.iterdir():
        small = folder / "small" / model.name
        shutil.copytree(model, small)
        config = AutoConfig.from_pretrained(small, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
        config.update({"hidden_size": 32, "head_dim": 16, "intermediate_size": 64})
        AutoModelForCausalLM.from_config(config).save_pretrained(small)
    return folder / "small"
