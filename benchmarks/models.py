"""Models to measure on: random ones built from a configuration, and trained ones where they are at hand."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.paths import SHARED
from patches import patched
from service.models.memory.cache_size import cache_bytes_per_token

"""Trained models and texts that are no part of the project; benchmarks run without them too."""

ENCODINGS: tuple[dict[str, Any], ...] = (
    {"method": "default"},
    {"method": "linear", "factor": 4.0},
    {"method": "dynamic", "factor": 4.0},
    {"method": "yarn", "factor": 4.0},
    {"method": "llama3", "factor": 8.0},
    {"method": "ntk", "factor": 4.0},
    {"method": "ntk_by_parts", "factor": 4.0},
    {"method": "yarn", "factor": 8.0},
)
"""Eight encodings that rotate at cache-write: attention itself is ordinary."""

BANDED: tuple[dict[str, Any], ...] = (
    *ENCODINGS[:6],
    {"method": "self_extend", "group_size": 4, "neighbor_window": 64},
    {"method": "alibi"},
)
"""Eight encodings, one of which has two bands and one a bias."""

SHAPE_28M = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1408,
    "max_position_embeddings": 1024,
}
"""A Llama of 28M parameters."""


def llama(**changes: Any) -> LlamaConfig:
    """Configuration of a Llama; by default about 5M parameters with heads of 64 dimensions, and no end token."""
    fields: dict[str, Any] = {
        "vocab_size": 2048,
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 704,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return LlamaConfig(**(fields | changes))


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Float32 weights with columns of unit length on average: attention far from uniform, logits far from ties."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.eval().requires_grad_(False)
    for weight in model.parameters():
        if weight.ndim == 2:
            weight.normal_(std=weight.shape[-1] ** -0.5)
    return model


@dataclass(frozen=True)
class Subject:
    """A model to measure; ``note`` says when a random one replaces a trained one."""

    name: str
    model: PreTrainedModel
    note: str | None = None


def cached_bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes that keys and values of one token take over all layers."""
    with patched(model) as patch:
        return cache_bytes_per_token(patch)


@contextmanager
def folder_of(name: str) -> Iterator[tuple[Path, str | None]]:
    """Folder of the trained model ``name``. If it is absent, a random one of its shape and a note that says so."""
    folder = SHARED / "models" / name
    if (folder / "config.json").is_file():
        yield folder, None
        return
    shape = _SHAPES[name]
    with tempfile.TemporaryDirectory() as temporary:
        stand_in = Path(temporary) / f"random-{name}"
        random_model(llama(**shape)).save_pretrained(stand_in)
        _byte_tokenizer().save_pretrained(stand_in)
        yield stand_in, f"{name} is absent (looked in {folder}): random weights of its shape instead"


_SHAPES: dict[str, dict[str, int]] = {
    "stories260K": {
        "hidden_size": 64,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 172,
        "vocab_size": 512,
        "max_position_embeddings": 512,
    },
    "llama3-1m-atto": {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 341,
        "max_position_embeddings": 512,
    },
}


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(token_models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def trained(name: str) -> Subject:
    """The trained model ``name`` or its replacement, set to never stop before the asked number of tokens."""
    with folder_of(name) as (folder, note):
        model = AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    return Subject(folder.name, model, note)


def native(model: PreTrainedModel, encoding: dict[str, Any]) -> PreTrainedModel | None:
    """A second model over the same weights with transformers' own version of ``encoding``, or None without one."""
    known = {"default", "linear", "dynamic", "yarn", "llama3"}
    if encoding["method"] not in known:
        return None
    config = type(model.config).from_dict(model.config.to_dict())
    parameters = {key: value for key, value in encoding.items() if key != "method"}
    if encoding["method"] == "llama3":
        parameters = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, **parameters}
    if encoding["method"] in ("yarn", "llama3"):
        parameters["original_max_position_embeddings"] = config.max_position_embeddings
    config.rope_parameters = {
        "rope_type": encoding["method"],
        "rope_theta": model.config.rope_parameters["rope_theta"],
        **parameters,
    }
    with torch.device("meta"):
        twin = type(model)(config)
    twin.load_state_dict(model.state_dict(), assign=True)
    twin.tie_weights()
    rotary = type(model.model.rotary_emb)(config)  # its frequencies are no part of the state
    twin.model.rotary_emb = rotary.to(model.device)
    twin.generation_config = model.generation_config
    served: PreTrainedModel = twin.eval().requires_grad_(False)
    return served
