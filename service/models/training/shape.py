"""The demo models' shape, their configurations and the folder they are stored in.

One RoPE model, and a variant for every encoding that is trained for: equal in shape, data and seed,
different only in what ``config.position_encoding`` says.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from patches import METHODS

Model = LlamaForCausalLM
BASE = "ropeway-demo"
ROTARY = "rope"
VARIANTS = {method.variant: name for name, method in METHODS.items() if method.variant is not None}
"""Kind of training -> the encoding method that it is trained with."""
KINDS = (ROTARY, *VARIANTS)


@dataclass(frozen=True)
class Preset:
    """Shape and optimizer of one size; ``batch`` in rows of ``context`` tokens, ``tokens`` as the default run."""

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context: int
    batch: int
    learning_rate: float
    tokens: int


PRESETS = {
    "cpu": Preset(192, 4, 4, 2, 64, 448, 2048, 256, batch=8, learning_rate=1.5e-3, tokens=12_000_000),
    "gpu": Preset(256, 6, 4, 2, 64, 704, 2048, 256, batch=256, learning_rate=3e-3, tokens=400_000_000),
    "tiny": Preset(32, 2, 2, 1, 16, 64, 320, 32, batch=8, learning_rate=5e-3, tokens=5_000),
}
"""``tiny`` is for tests; ``gpu`` has more than twice the parameters of ``cpu``."""


def served_name(kind: str) -> str:
    return BASE if kind == ROTARY else f"{BASE}-{kind}"


def model_config(kind: str, preset: Preset, vocab_size: int, bos_token_id: int, eos_token_id: int) -> LlamaConfig:
    """Configuration of the model of ``kind``; the RoPE model names its variants, each variant its encoding."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=preset.hidden_size,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads,
        num_key_value_heads=preset.kv_heads,
        head_dim=preset.head_dim,
        intermediate_size=preset.intermediate_size,
        max_position_embeddings=preset.context,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=bos_token_id,
        eos_token_id=eos_token_id,
        pad_token_id=eos_token_id,
    )
    if kind == ROTARY:
        config.position_encoding_variants = {variant: served_name(variant) for variant in VARIANTS}
    else:
        config.position_encoding = {"method": VARIANTS[kind]}
    return config


def new_model(config: LlamaConfig, seed: int, device: torch.device) -> Model:
    """Freshly initialized weights; the same seed gives every kind the same ones."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    torch.nn.Module.to(model, device)
    return model


def save_folder(model: Model, tokenizer_folder: Path, folder: Path) -> None:
    """Write weights in float16, configurations and tokenizer as one Hugging Face folder."""
    config = model.config
    half = LlamaForCausalLM(LlamaConfig.from_dict(config.to_dict()))
    half.load_state_dict(model.state_dict())
    half.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    half.half().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer_folder / name, folder / name)
