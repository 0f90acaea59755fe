"""Reading a loaded model: its rotary geometry, its native encoding, and whether it can be carried at all.

Works on attributes alone, so that it needs no model library. Everything that differs between
architectures is measured on the model's own functions with probe tensors, never looked up by name.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from patches.recipe import RopeGeometry
from patches.registry import parse
from patches.rotary import rotary_table, rotate


class UnsupportedModel(ValueError):
    """This model cannot be served with an encoding per request; the message says why."""


@dataclass(frozen=True)
class RotarySeam:
    """The model's rotary module and how its output looks: pair layout of the table, and its dtype rule."""

    module: nn.Module
    table_interleaved: bool
    keeps_float32: bool


def geometry_of(model: nn.Module) -> RopeGeometry:
    """Geometry of a causal language model.

    Raises:
        UnsupportedModel: naming what this model does that the seams cannot carry.
    """
    config = _text_config(model)
    attention = _attention_module(model)
    _refuse_special_attention(model, config, attention)
    rotary = rotary_module(model)
    rotary_dim = 2 * _inv_freq(rotary).shape[0]
    parameters = dict(config.rope_parameters)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    trained_length = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
    native, rotates = _native_encoding(config, parameters)
    return RopeGeometry(
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=float(parameters["rope_theta"]),
        original_max_position_embeddings=int(trained_length),
        max_position_embeddings=int(config.max_position_embeddings),
        num_attention_heads=int(config.num_attention_heads),
        interleaved=_rotates_interleaved(attention, rotary_dim),
        rotates=rotates,
        native=native,
    )


def rotary_module(model: nn.Module) -> nn.Module:
    """The one module that turns positions into cos and sin.

    Raises:
        UnsupportedModel: when there is none, or several.
    """
    found = [m for m in model.modules() if isinstance(getattr(m, "inv_freq", None), torch.Tensor)]
    if not found:
        raise UnsupportedModel("the model has no rotary module at model level (no inv_freq to replace)")
    if len(found) > 1:
        raise UnsupportedModel(f"the model has {len(found)} rotary modules; one shared by all layers is needed")
    return found[0]


def probe_rotary(model: nn.Module) -> RotarySeam:
    """Measure the rotary module's table layout and whether it keeps float32 for half-precision inputs."""
    module = rotary_module(model)
    probed = copy.deepcopy(module)  # a length-dependent one rewrites its buffers when it runs
    inv_freq = probed.inv_freq
    assert isinstance(inv_freq, torch.Tensor)
    position = torch.arange(3, device=inv_freq.device)[None]
    with torch.no_grad():
        cos, _ = probed(torch.zeros(1, 1, 1, dtype=torch.float32, device=inv_freq.device), position)
        half, _ = probed(torch.zeros(1, 1, 1, dtype=torch.bfloat16, device=inv_freq.device), position)
    inv_freq = probed.inv_freq  # as the run left it
    assert isinstance(inv_freq, torch.Tensor)
    for interleaved in (False, True):
        ours, _ = rotary_table(position, inv_freq.float(), 1.0, interleaved=interleaved)
        factor = getattr(probed, "attention_scaling", 1.0)
        if cos.shape == ours.shape and torch.allclose(cos.float(), ours * factor, atol=1e-5):
            return RotarySeam(module, interleaved, half.dtype == torch.float32)
    raise UnsupportedModel(f"the rotary module returns a table of shape {tuple(cos.shape)} in no known layout")


def _inv_freq(module: nn.Module) -> torch.Tensor:
    inv_freq = module.inv_freq
    assert isinstance(inv_freq, torch.Tensor)  # rotary_module chose it by that
    return inv_freq


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    if config is None:
        raise UnsupportedModel("the model carries no configuration")
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _attention_module(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if hasattr(module, "layer_idx") and type(module).__name__.endswith("Attention"):
            return module
    raise UnsupportedModel("the model has no attention modules with a layer_idx")


def _refuse_special_attention(model: nn.Module, config: Any, attention: nn.Module) -> None:
    parameters = getattr(config, "rope_parameters", None)
    can_set = getattr(model, "_can_set_attn_implementation", None)  # true where attention dispatches by name
    if can_set is None or not can_set():
        raise UnsupportedModel("its attention does not dispatch by name, so no attention can be put in its place")
    if not isinstance(parameters, dict):
        raise UnsupportedModel("its configuration has no rope_parameters: it has no rotary embeddings to replace")
    if "rope_theta" not in parameters:
        raise UnsupportedModel("its rope_parameters differ by layer type; one set shared by all layers is needed")
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModel("latent attention (MLA) concatenates rotated and plain parts before the seam")
    if getattr(attention, "sinks", None) is not None:
        raise UnsupportedModel("its attention has learned sinks, which change the softmax")


def _native_encoding(config: Any, parameters: dict[str, Any]) -> tuple[tuple[tuple[str, object], ...], bool]:
    """The checkpoint's own encoding as request fields, and whether it rotates."""
    declared = getattr(config, "position_encoding", None)
    if declared is None and parameters.get("rope_type", "default") == "default":
        return (), True
    fields = dict(declared or parameters)
    if fields.get("rope_type") == "dynamic":  # transformers scales from this length, whatever else is given
        fields["original_max_position_embeddings"] = config.max_position_embeddings
    try:
        method = parse(fields)
    except ValidationError as error:
        raise UnsupportedModel(f"its native encoding {fields!r} is not one we carry: {error}") from error
    frozen = tuple((name, tuple(v) if isinstance(v, list) else v) for name, v in fields.items())
    return frozen, "rope_theta" in type(method).model_fields


def _rotates_interleaved(attention: nn.Module, rotary_dim: int) -> bool:
    """Which pairs the model's own ``apply_rotary_pos_emb`` rotates, found by running it."""
    apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if apply is None:
        raise UnsupportedModel("its module has no apply_rotary_pos_emb to measure the rotary layout with")
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, 1, 3, rotary_dim, generator=generator)
    inv_freq = 0.7 ** torch.arange(rotary_dim // 2)
    position = torch.arange(3)[None]
    for interleaved in (False, True):
        expected_table = rotary_table(position[0], inv_freq, 1.0, interleaved=interleaved)
        expected = rotate(states, *expected_table, interleaved=interleaved)
        for table_interleaved in (False, True):
            table = rotary_table(position, inv_freq, 1.0, interleaved=table_interleaved)
            rotated, _ = apply(states, states, *table)
            if torch.allclose(rotated, expected, atol=1e-5):
                return interleaved
    raise UnsupportedModel("its apply_rotary_pos_emb rotates neither half-split nor interleaved pairs")
