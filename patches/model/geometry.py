"""Geometry and native encoding of a loaded model, or the reason why the seams cannot carry it.

Works on attributes alone, so that it needs no model library. ``patches.model.measurement`` finds out later how a
model rotates (pair layout, where in a head, which layers) on its own forward pass, never by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from patches.encoding.geometry import Family, RopeGeometry
from patches.encoding.method import FrequencyMethod, Method
from patches.encoding.recipe import ResolvedRecipe
from patches.model.architectures import Architecture, architecture_of
from patches.parsing import InvalidEncoding, parse
from patches.registry import METHODS
from patches.rope_parameters import SHARED

NOT_OF_THE_ENCODING = frozenset({"llama_4_scaling_beta", "max_position_embeddings"})
"""Entries of ``rope_parameters`` that a model's attention applies by itself, or that only repeat its length."""


class UnsupportedModel(ValueError):
    """This model cannot be served with an encoding per request; the message says why."""


def geometry_of(model: nn.Module) -> RopeGeometry:
    """Geometry of a causal language model, as far as its configuration has it.

    Raises:
        UnsupportedModel: naming what this model does that the seams cannot carry.
    """
    config = text_config(model)
    architecture = architecture_of(model)
    if architecture is None:
        _refuse_attention_that_does_not_dispatch(model)
    facts = {} if architecture is None else architecture.facts(config) | architecture.in_weights(model)
    parameters = facts.pop("rope_parameters", None) or _rope_parameters(config, architecture)
    native = _native_encoding(config, parameters, facts.pop("native", None))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    latent = getattr(config, "kv_lora_rank", None) is not None
    if latent:
        head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    longest = facts.pop("max_position_embeddings", None) or config.max_position_embeddings
    measured = {
        "head_dim": head_dim,
        "rotary_dim": 0 if parameters is None else _rotary_dim(model),
        "rope_theta": 0.0 if parameters is None else float(parameters["rope_theta"]),
        "original_max_position_embeddings": _trained_length(config, parameters or {}, native, int(longest)),
        "max_position_embeddings": int(longest),
        "num_attention_heads": int(config.num_attention_heads),
        "family": _family_of(native, parameters),
        "native": native,
        "latent": latent,
    }
    return RopeGeometry(**{**measured, **facts})


def text_config(model: nn.Module) -> Any:
    """The configuration of the language model itself."""
    config = getattr(model, "config", None)
    if config is None:
        raise UnsupportedModel("the model carries no configuration")
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def chunked_layers(config: Any) -> dict[int, int]:
    """Layer -> tokens per chunk, for layers that attend within chunks (Llama 4)."""
    kinds = getattr(config, "layer_types", None) or []
    return {index: int(config.attention_chunk_size) for index, kind in enumerate(kinds) if kind == "chunked_attention"}


def _refuse_attention_that_does_not_dispatch(model: nn.Module) -> None:
    can_set = getattr(model, "_can_set_attn_implementation", None)  # true where attention dispatches by name
    if can_set is None or not can_set():
        raise UnsupportedModel("its attention does not dispatch by name, so no attention can be put in its place")


def _rope_parameters(config: Any, architecture: Architecture | None) -> dict[str, Any] | None:
    """Parameters of the rotary embedding that requests replace; None for a model without one."""
    parameters = getattr(config, "rope_parameters", None)
    if architecture is not None and not architecture.rotates(config):
        return None
    if not isinstance(parameters, dict):
        return None
    if "rope_theta" in parameters:
        return dict(parameters)
    if SHARED in parameters and parameters[SHARED] is not None:
        # transformers looks for "truncate" beside the layer types (5.23), so what a type says has no effect.
        return {name: value for name, value in parameters[SHARED].items() if name != "truncate"}
    raise UnsupportedModel(f"its rope_parameters differ by layer type and none of them is for {SHARED} layers")


@dataclass(frozen=True)
class RotaryModule:
    """The module that turns positions into cos and sin. ``types`` are its layer types, the one that requests
    choose first; empty where all layers share one set of frequencies."""

    module: nn.Module
    types: tuple[str, ...]

    @property
    def inv_freq(self) -> torch.Tensor:
        name = f"{self.types[0]}_inv_freq" if self.types else "inv_freq"
        return self.module.get_buffer(name)

    def is_chosen(self, layer_type: str | None) -> bool:
        """True if requests choose the encoding of layers of this type."""
        return layer_type in (None, *self.types[:1])


def rotary_module(model: nn.Module) -> RotaryModule | None:
    """The model's rotary module, or None.

    Raises:
        UnsupportedModel: when there are several.
    """
    found = [module for module in model.modules() if any(_is_inv_freq(name) for name in module._buffers)]
    if len(found) > 1:
        raise UnsupportedModel(f"the model has {len(found)} rotary modules; one shared by all layers is needed")
    if not found:
        return None
    types = [name.removesuffix("_inv_freq") for name in found[0]._buffers if _is_inv_freq(name) and name != "inv_freq"]
    if types and SHARED not in types:
        raise UnsupportedModel(f"its rotary embeddings differ by layer type and none of them is for {SHARED} layers")
    return RotaryModule(found[0], tuple(sorted(types, key=lambda name: name != SHARED)))


def refuse_other_frequencies(rotary: RotaryModule, native: ResolvedRecipe) -> None:
    """Raises:
    UnsupportedModel: when the checkpoint's own encoding, as resolved here, is not what its rotary module computes.
    """
    if native.length is not None or not native.rotates:
        return  # a module that depends on the length rewrites its frequencies when it runs; Falcon with ALiBi uses none
    own, resolved = rotary.inv_freq.float().cpu(), torch.tensor(native.inv_freq)
    tolerance = max(1e-4, 8 * torch.finfo(rotary.inv_freq.dtype).eps)
    if own.shape != resolved.shape or not torch.allclose(own, resolved, rtol=tolerance, atol=0.0):
        raise UnsupportedModel(
            f"its rotary module rotates by frequencies down to {float(own[-1]):.3g}, and its configuration says "
            f"{native.inv_freq[-1]:.3g}"
        )


def _is_inv_freq(buffer: str) -> bool:
    return buffer.endswith("inv_freq") and "original" not in buffer


def _rotary_dim(model: nn.Module) -> int:
    rotary = rotary_module(model)
    return 0 if rotary is None else 2 * rotary.inv_freq.shape[0]


def _native_encoding(config: Any, parameters: dict[str, Any] | None, declared: Any) -> Method | None:
    """The checkpoint's own encoding, None for plain RoPE.

    Raises:
        UnsupportedModel: when we have no such method.
    """
    fields = getattr(config, "position_encoding", None) or declared
    if fields is None:
        if parameters is None:
            raise UnsupportedModel("its configuration names no positional encoding that we know")
        if parameters.get("rope_type", "default") == "default":
            return None
        fields = {name: value for name, value in parameters.items() if name not in NOT_OF_THE_ENCODING}
    fields = dict(fields)
    known = METHODS[fields["rope_type"]].model_fields if fields.get("rope_type") in METHODS else fields
    if "original_max_position_embeddings" not in known:  # the trained length, which has its own place
        fields.pop("original_max_position_embeddings", None)
    if fields.get("rope_type") == "dynamic":  # transformers scales from this length, whatever else is given
        fields["original_max_position_embeddings"] = config.max_position_embeddings
    try:
        return parse(fields)
    except InvalidEncoding as error:
        raise UnsupportedModel(f"its native encoding {fields!r} is not one we carry: {error}") from error


def _trained_length(config: Any, parameters: dict[str, Any], native: Method | None, longest: int) -> int:
    """Length of the training before any scaling; every ``factor`` is relative to it."""
    declared = parameters.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    if declared:
        return int(declared)
    if native is not None and parameters.get("rope_type") == "linear":
        # By convention such a checkpoint declares the length after interpolation and keeps no other.
        return max(2, round(longest / float(parameters["factor"])))
    return longest


def _family_of(native: Method | None, parameters: dict[str, Any] | None) -> Family:
    if native is None or (parameters is not None and isinstance(native, FrequencyMethod)):
        return "rotary"
    return METHODS[native.method].family
