"""A model's fingerprint: what its outcomes depend on beside the inputs, the encoding and our code.

It is taken once, at load and before the first forward: transformers changes configurations while it runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import torch

from service.machine.cpus import processor
from service.models.checkpoint.numerics import Numerics
from service.models.linear.layers import products_of
from service.models.memory.weights import parts, whole

UNRELATED = {"_name_or_path", "transformers_version", "distributed_config"}
"""Keys of a configuration that say where a model came from or runs, and not what it is."""

BLOCK = 1 << 20
"""Numbers of a tensor that are summed at a time."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their size in bytes, to read the bits of numbers."""


def fingerprint(model: Any, of_contents: str | None = None) -> str:
    """SHA-256 in hex of a model's contents, which are ``of_contents`` if known, and of the numerics it runs with."""
    return _digest([of_contents or contents(model), numerics(model).model_dump()])


def contents(model: Any) -> str:
    """A hash that differs for models that differ. It covers the configuration, and sums over every saved tensor,
    weighted by place so that swapped rows show. It is the same on every machine and for any number of threads."""
    config = {
        name: value for name, value in model.config.to_dict().items() if name not in UNRELATED and not callable(value)
    }
    saved = model.state_dict()  # computed buffers, such as frequencies, may differ in the last bit between machines
    tensors = [*model.named_parameters(), *((name, t) for name, t in model.named_buffers() if name in saved)]
    known = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *tensors)}
    # Scales of quantized weights may be neither parameters nor buffers (bitsandbytes).
    tensors += [(name, t) for name, t in saved.items() if name not in known and isinstance(t, torch.Tensor)]
    text = json.dumps(config, sort_keys=True, default=str)
    return _digest([text, [[name, list(t.shape), str(t.dtype), *_sums_of_parts(t)] for name, t in tensors]])


def _sums_of_parts(tensor: torch.Tensor) -> Iterator[list[list[int]]]:
    """Sums of a tensor, or of the codes and scales of a quantized one."""
    return map(_sums, parts(whole(tensor.detach())))


def _sums(tensor: torch.Tensor) -> list[list[int]]:
    """Two sums of each block's bits as integers modulo 2^64, one weighted by place; no order of sums changes them."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten()
    bits = flat.view(INTEGERS[flat.element_size()])
    places = torch.arange(1, min(BLOCK, len(bits)) + 1, device=bits.device)
    sums = []
    for block in bits.split(BLOCK):
        values = block.long()
        sums.append(torch.stack((values.sum(), (values * places[: len(values)]).sum())).tolist())
    return sums


def numerics(model: Any) -> Numerics:
    """The numerics that a loaded model runs with."""
    device = model.device
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        hardware = f"{processor()} {torch.backends.cpu.get_cpu_capability()}"
    return Numerics(
        torch=torch.__version__,
        transformers=metadata.version("transformers"),
        device=device.type,
        hardware=hardware,
        dtype=str(model.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        tensor_parallel=getattr(model, "tp_size", None) or 1,
        products=products_of(model),
    )


def of_tokenizer(tokenizer: Any) -> str:
    """A hash of a tokenizer: vocabulary, rules, special tokens, chat template. Not of how its last call cut and padded,
    which its JSON has before ``added_tokens``."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        rules = json.dumps(sorted(tokenizer.get_vocab().items()))
    else:
        rules = backend.to_str().partition('"added_tokens"')[2]
    special = {name: str(token) for name, token in getattr(tokenizer, "special_tokens_map", {}).items()}
    about = [
        type(tokenizer).__name__,
        special,
        *(getattr(tokenizer, name, None) for name in ("add_bos_token", "chat_template")),
    ]
    return _digest([hashlib.sha256(rules.encode(errors="surrogatepass")).hexdigest(), about])


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()
