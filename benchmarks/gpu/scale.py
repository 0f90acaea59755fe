"""Sizes of the models and of the work of the suite, on a card and as a smoke run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from benchmarks.models import llama, native

Row = tuple[str, float, str, str]

LLAMA_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": True,
}
LLAMA_8B = LLAMA_1B | {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "tie_word_embeddings": False,
}

GEMMA_1B: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 1152,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "sliding_window": 512,
    "layer_types": [("full" if layer % 6 == 5 else "sliding") + "_attention" for layer in range(26)],
}


@dataclass
class Scale:
    """Sizes of models and work. ``copy_rate`` (bytes/s) and ``matrix_rate`` (operations/s) are measured first."""

    device: str
    dtype: torch.dtype
    shapes: dict[str, dict[str, Any]]
    prompt: int = 512
    steps: int = 64
    batches: tuple[int, ...] = (1, 64)
    crowded_prompt: int = 2048
    long_prompt: int = 32768
    longest_prompt: int = 131072
    rounds: int = 3
    prefill: int = 2048
    score_tokens: int = 32768
    copy_bytes: int = 2 << 30
    matrix: int = 8192
    copy_rate: float = float("nan")
    matrix_rate: float = float("nan")
    windowed: dict[str, Any] = field(default_factory=lambda: GEMMA_1B)
    _models: dict[str, LlamaForCausalLM] = field(default_factory=dict)

    def model(self, name: str) -> LlamaForCausalLM:
        """Random weights of shape ``name``, made on the device; only the last one stays in memory."""
        if name not in self._models:
            self._models.clear()
            with torch.device(self.device):
                model = LlamaForCausalLM._from_config(llama(**self.shapes[name]), dtype=self.dtype)
            self._models[name] = model.eval().requires_grad_(False)
        return self._models[name]


GPU = Scale("cuda", torch.bfloat16, {"1B": LLAMA_1B, "8B": LLAMA_8B})
_TINY = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}
SMOKE = Scale(
    "cpu",
    torch.float32,
    {"1B": _TINY | {"tie_word_embeddings": True}, "8B": _TINY | {"num_hidden_layers": 3}},
    prompt=16,
    crowded_prompt=20,
    long_prompt=48,
    longest_prompt=64,
    steps=64,  # a busy machine may begin requests tens of milliseconds apart, and steps take half of one
    batches=(1, 3),
    rounds=1,
    prefill=64,
    score_tokens=96,
    copy_bytes=1 << 20,
    matrix=64,
    windowed=GEMMA_1B
    | _TINY
    | {"head_dim": 16, "sliding_window": 16, "num_hidden_layers": 6, "layer_types": GEMMA_1B["layer_types"][:6]},
)


def random_ids(scale: Scale, count: int, seed: int = 0) -> torch.Tensor:
    vocab = min(shape["vocab_size"] for shape in scale.shapes.values())
    ids = torch.randint(3, vocab, (count,), generator=torch.Generator().manual_seed(seed))
    return ids.to(scale.device)


def twin_of(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a second, unpatched model."""
    twin = native(model, {"method": "default"})
    assert twin is not None
    return twin


def decoded_weights(model: PreTrainedModel) -> int:
    """Bytes of weights that every decode step reads: all but an embedding table that is only looked up."""
    total = sum(weight.nbytes for weight in model.parameters())
    return total if model.config.tie_word_embeddings else total - model.get_input_embeddings().weight.nbytes


def reset_peak(scale: Scale) -> None:
    if scale.device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak(scale: Scale) -> int:
    """Most bytes allocated since ``reset_peak``; 0 without a card."""
    return torch.cuda.max_memory_allocated() if scale.device == "cuda" else 0
