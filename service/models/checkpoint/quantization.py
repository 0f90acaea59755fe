"""Linear layers in 8 or 4 bits, quantized at load by torchao; and checkpoints that are quantized already.

Activations, embeddings, the output layer and the cache keep their number format. In int8, each row has a scale. In
int4, each group of 128, 64 or 32 columns has a scale and a zero point. The group is the widest that divides the
row. Layers whose shape fits no group take int8.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from service.models.linear.int4 import FEW, by_blocks, by_codes, in_int4
from service.models.linear.layers import UNBOUNDED, ChosenLinear, replace

if TYPE_CHECKING:
    from torchao.core.config import AOBaseConfig

Scheme = Literal["int8", "int4"]

GROUPS = (128, 64, 32)
"""Columns that share a scale in int4; each of them is one that the kernels of every device have."""

ROWS = 16
"""The number of rows is a multiple of this in torchao's kernel for CPUs."""


class NotQuantized(ValueError):
    """The model or the device cannot be quantized in this way; the message says why."""


@dataclass(frozen=True)
class Quantization:
    """``scheme`` is int8, int4 or the method of the checkpoint; ``layers`` counts those quantized at load by format."""

    scheme: str
    layers: dict[str, int] = field(default_factory=dict)


def of_checkpoint(model: Any) -> Quantization | None:
    """The quantization that the checkpoint came with."""
    config = getattr(model.config, "quantization_config", None)
    if config is None:
        return None
    method = config.get("quant_method") if isinstance(config, dict) else config.quant_method
    return Quantization(str(getattr(method, "value", method)))


def quantize(model: Any, scheme: Scheme, device: torch.device) -> Quantization:
    """Quantize ``model`` in place and move it to ``device``, layer by layer.

    Raises:
        NotQuantized: when torchao is absent, or the model is quantized already or has no such layers. Also when the
            device has no kernel for the model's number format.
    """
    if (found := of_checkpoint(model)) is not None:
        raise NotQuantized(f"the checkpoint is quantized already, by {found.scheme}")
    layers = _linear_layers(model)
    formats = {name: format_of(layer, scheme) for name, layer in layers.items()}
    _refuse_other_weights(model, formats)
    own = {name: layer for name, layer in layers.items() if formats[name][0] == "int4" and _has_own(layer, device)}
    configs = _configs({formats[name] for name in layers if name not in own}, model.dtype, device)
    from torchao.quantization import quantize_

    for name, layer in layers.items():
        if name not in own:
            quantize_(layer, configs[formats[name]], filter_fn=lambda *_: True, device=device)
    model.to(device)
    replace(model, {layer: _with_own(layer, formats[name][1]) for name, layer in own.items()})
    return Quantization(scheme, dict(Counter(kind for kind, _ in formats.values())))


def _has_own(layer: nn.Linear, device: torch.device) -> bool:
    """True where int4 has our products: on a CPU, those of torchao are fast in bfloat16 alone."""
    return device.type == "cpu" and layer.weight.dtype != torch.bfloat16


def _with_own(layer: nn.Linear, group: int) -> ChosenLinear:
    layer.weight = nn.Parameter(in_int4(layer.weight.detach(), group), requires_grad=False)
    return ChosenLinear(layer, ((FEW, by_codes), (UNBOUNDED, by_blocks)))


def _linear_layers(model: Any) -> dict[str, nn.Linear]:
    """Linear layers but the output layer, whose weights are often the embedding's, and those that encodings read.

    Subclasses with a forward of another kind read their weights in ways that torchao has no kernel for (DeepSeek-V4).
    """
    output = model.get_output_embeddings()
    linear = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    found = ((name, module) for name, module in linear if type(module).forward is nn.Linear.forward)
    return {name: module for name, module in found if module is not output and ".relative." not in name}


def format_of(layer: nn.Linear, scheme: Scheme) -> tuple[Scheme, int]:
    """(format, columns per group) of a layer; int8 has one group per row, written as 0."""
    rows, columns = layer.weight.shape
    group = next((size for size in GROUPS if columns % size == 0), 0) if rows % ROWS == 0 else 0
    return ("int4", group) if scheme == "int4" and group else ("int8", 0)


def _refuse_other_weights(model: Any, formats: dict[str, Any]) -> None:
    """Raises:
    NotQuantized: for a model without linear layers, and for one with most weights in stacked tensors (experts).
    """
    if not formats:
        raise NotQuantized("it has no linear layers of torch (GPT-2's are convolutions)")
    parameters = list(model.parameters())
    stacked = sum(parameter.numel() for parameter in parameters if parameter.ndim > 2)
    if 2 * stacked > sum(parameter.numel() for parameter in parameters):
        raise NotQuantized("most of its weights are stacked experts, which torchao's weight-only formats leave out")


def _configs(
    formats: set[tuple[Scheme, int]], dtype: torch.dtype, device: torch.device
) -> dict[tuple[Scheme, int], AOBaseConfig]:
    """torchao's configurations of ``formats``, and always that of int8."""
    try:
        from torchao.quantization import Int8WeightOnlyConfig
    except ImportError as error:
        raise NotQuantized("it needs the package torchao (the extra `quantization`)") from error
    found: dict[tuple[Scheme, int], AOBaseConfig] = {("int8", 0): Int8WeightOnlyConfig(set_inductor_config=False)}
    groups = [group for _, group in formats if group]
    return found | {("int4", group): _int4(group, dtype, device) for group in groups}


def _int4(group: int, dtype: torch.dtype, device: torch.device) -> AOBaseConfig:
    """The configuration of int4 with so many columns per group.

    Raises:
        NotQuantized: when torchao has no kernel for the number format or the device.
    """
    if device.type == "cpu":
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        return PrototypeInt4WeightOnlyConfig(group_size=group, set_inductor_config=False)
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 8:
        raise NotQuantized(f"int4 has kernels for CPUs and for CUDA from capability 8.0, not for {device}")
    if dtype != torch.bfloat16:
        raise NotQuantized(f"int4 on CUDA computes in bfloat16, and ROPEWAY_DTYPE makes it {dtype}")
    from torchao.quantization import Int4WeightOnlyConfig
    from torchao.quantization.quantize_.workflows import Int4PackingFormat

    packing = Int4PackingFormat.TILE_PACKED_TO_4D
    return Int4WeightOnlyConfig(group_size=group, int4_packing_format=packing, set_inductor_config=False)
