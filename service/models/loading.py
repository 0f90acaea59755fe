"""From a Hugging Face id or folder to a model in memory, and how much cache fits beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from patches import Patched
from service.models import architecture
from service.settings import Settings

DEMO = Path(__file__).parent / "demo"
CPU_CACHE_TOKENS = 32768
"""Default cache on a CPU, where memory is shared with everything else."""


class ModelLoadError(RuntimeError):
    """The checkpoint cannot be loaded; the message says what was tried and why it failed."""


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model with its tokenizer. ``name`` is what requests call it."""

    name: str
    model: PreTrainedModel
    tokenizer: Any


def load(name: str, source: str | Path, settings: Settings) -> Checkpoint:
    """Load safetensors weights onto the configured device; no remote code.

    Raises:
        ModelLoadError: when the checkpoint is absent or of a kind that cannot be loaded.
    """
    device = torch.device(device_of(settings))
    architecture.register()
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=settings.revision)
        model = AutoModelForCausalLM.from_pretrained(
            source, revision=settings.revision, dtype=dtype_of(settings, device), use_safetensors=True
        )
    except (OSError, ValueError, ImportError) as error:
        raise ModelLoadError(f"model {str(source)!r} cannot be loaded: {error}") from error
    torch.nn.Module.to(model, device)
    return Checkpoint(name, model.eval(), tokenizer)


def sources(settings: Settings) -> dict[str, str | Path]:
    """Served name -> where to load it from, the default model first: one model, or all that a folder holds."""
    path = DEMO if settings.model == "demo" else Path(settings.model)
    if not path.is_dir():
        return {settings.model: settings.model}
    if not (path / "config.json").exists():
        inside = sorted(path.glob("*/config.json"))
        if inside:
            return {config.parent.name: config.parent for config in inside}
    return {path.resolve().name: path}


def device_of(settings: Settings) -> str:
    if settings.device != "auto":
        return settings.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def dtype_of(settings: Settings, device: torch.device) -> torch.dtype:
    if settings.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[settings.dtype]


def cache_bytes_per_token(patch: Patched) -> int:
    """Bytes that keys and values of one token take over all layers of a paged cache, whose rows have one width."""
    cached, layers = patch.cached, patch.model.config.get_text_config().num_hidden_layers
    return int(2 * layers * cached.calls * cached.heads * cached.width * patch.model.dtype.itemsize)


def cache_tokens(patch: Patched, settings: Settings) -> int:
    """Tokens of paged cache: as configured, else 70 % of the accelerator's free memory or a fixed CPU share.

    Raises:
        ModelLoadError: when what is configured exceeds free memory.
    """
    model, per_token = patch.model, cache_bytes_per_token(patch)
    if model.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(model.device)
    else:
        free = psutil.virtual_memory().available
    if settings.cache_tokens is not None:
        if settings.cache_tokens * per_token > free:
            raise ModelLoadError(
                f"cache_tokens={settings.cache_tokens} needs {settings.cache_tokens * per_token >> 20} MiB "
                f"and {free >> 20} MiB are free: at most {free // per_token} tokens fit"
            )
        return settings.cache_tokens
    share = int(free * 0.7 if model.device.type == "cuda" else free * 0.25) // per_token
    wanted = share if model.device.type == "cuda" else min(CPU_CACHE_TOKENS, share)
    return max(settings.page_size * 4, wanted // settings.page_size * settings.page_size)
