"""The demo models' shape, their configurations and the folder they are stored in.

There is one RoPE model, a variant per trained encoding, and on request one of every other family. They are equal in
shape, data and seed, and differ only in their positions.
"""

from __future__ import annotations

import copy
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from patches import METHODS
from service.models import architecture
from service.models.architecture import RopewayDemoConfig, RopewayDemoForCausalLM
from service.models.text.chat import PLAIN
from service.models.training.curriculum import RECALL, Stage

Model = LlamaForCausalLM
BASE = "ropeway-demo"
ROTARY = "rope"
VARIANTS = {method.variant: name for name, method in METHODS.items() if method.variant is not None}
"""Kind of training -> the encoding method that it is trained with."""
KINDS = (ROTARY, *VARIANTS)
"""The models that ship."""
REPARAMETERIZED: dict[str, dict[str, Any]] = {
    "nope": {"position_encoding": {"method": "none"}},
    "rope_theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
}
"""Families that take no more than another configuration of a Llama."""
FAMILIES = (*KINDS, *REPARAMETERIZED, *architecture.FAMILIES)
"""All that can be trained."""


@dataclass(frozen=True)
class Preset:
    """Shape and optimizer of one size; ``batch`` in rows of ``context`` tokens, ``tokens`` as the default run.

    Without ``stages``, every row is text of ``context`` tokens.
    """

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
    stages: tuple[Stage, ...] = ()


TEXT = Preset(192, 4, 4, 2, 64, 448, 2048, 256, batch=8, learning_rate=1.5e-3, tokens=17_203_200)
PRESETS = {
    "cpu": TEXT,
    "recall": replace(TEXT, tokens=6_553_600, stages=RECALL),
    "gpu": Preset(256, 6, 4, 2, 64, 704, 2048, 256, batch=256, learning_rate=3e-3, tokens=400_000_000),
    "small": Preset(128, 3, 4, 2, 32, 320, 2048, 256, batch=8, learning_rate=2e-3, tokens=4_000_000),
    "tiny": Preset(32, 2, 2, 1, 16, 64, 320, 32, batch=8, learning_rate=5e-3, tokens=5_000),
}
"""``tiny`` is for tests; ``small`` trains in about ten minutes on one thread, to compare families; ``gpu`` has more
than twice the parameters of ``cpu``; ``recall`` goes on from the models of ``cpu`` (``train --initial``)."""

SHIPPED = "recall"
"""The preset of the models that ship."""


def initial_model(folder: Path, config: LlamaConfig, device: torch.device) -> Model:
    """The trained weights of ``folder`` in float32, as the model to go on from.

    Raises:
        ValueError: when its model has another configuration; the message names the first field that differs.
    """
    kind: Any = RopewayDemoForCausalLM if isinstance(config, RopewayDemoConfig) else LlamaForCausalLM
    model: Model = kind.from_pretrained(folder, dtype=torch.float32)
    asked, found = config.to_dict(), model.config.to_dict()
    for name in ("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings", "position_encoding"):
        if asked.get(name) != found.get(name):
            raise ValueError(f"{folder}: {name} is {found.get(name)}, and the preset has {asked.get(name)}")
    torch.nn.Module.to(model, device)
    return model


def served_name(kind: str) -> str:
    return BASE if kind == ROTARY else f"{BASE}-{kind}"


def model_config(kind: str, preset: Preset, vocab_size: int, bos_token_id: int, eos_token_id: int) -> LlamaConfig:
    """Configuration of the model of ``kind``; the RoPE model names its variants, the others what they have instead."""
    own: dict[str, Any] = {"position_family": kind} if kind in architecture.FAMILIES else {}
    config = (RopewayDemoConfig if own else LlamaConfig)(
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
        **own,
    )
    if kind == ROTARY:
        config.position_encoding_variants = {variant: served_name(variant) for variant in VARIANTS}
    elif kind in VARIANTS:
        config.position_encoding = {"method": VARIANTS[kind]}
    for name, value in REPARAMETERIZED.get(kind, {}).items():
        setattr(config, name, value)
    return config


def encoding_of(kind: str) -> str:
    """The positions of ``kind``, in words for its card."""
    if kind in architecture.FAMILIES:
        return architecture.FAMILIES[kind]
    rope: dict[str, Any] = {"rope_theta": 10_000.0} | REPARAMETERIZED.get(kind, {}).get("rope_parameters", {})
    instead = REPARAMETERIZED.get(kind, {}).get("position_encoding", {}).get("method", VARIANTS.get(kind))
    if instead is None:
        return f"rotary position embedding (theta {rope['rope_theta']:.0f})"
    return f"`{instead}` instead of rotary position embedding, by Ropeway's own patch"


def new_model(config: LlamaConfig, seed: int, device: torch.device) -> Model:
    """Freshly initialized weights; the same seed gives every kind the same ones, whatever it has besides."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(copy.deepcopy(config))  # it notes there which attention it runs
    if isinstance(config, RopewayDemoConfig):
        shared, model = model.state_dict(), RopewayDemoForCausalLM(config)
        model.load_state_dict(shared, strict=False)
    torch.nn.Module.to(model, device)
    return model


def save_folder(model: Model, tokenizer_folder: Path, folder: Path) -> None:
    """Write weights in float16, configurations, tokenizer and a chat template as one Hugging Face folder."""
    config = model.config
    half = type(model)(type(config).from_dict(config.to_dict()))
    half.load_state_dict(model.state_dict())
    half.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    half.half().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer_folder / name, folder / name)
    (folder / "chat_template.jinja").write_text(PLAIN, encoding="utf-8")
