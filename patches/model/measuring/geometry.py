"""Geometry and native encoding of a loaded model, or the reason why the seams cannot carry it.

Works on attributes alone, so that it needs no model library. ``patches.model.measuring.measurement`` finds out later
how a model rotates (pair layout, where in a head, which layers). It does so on the model's own forward pass, never by
name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from patches.encoding.geometry import Family, RopeGeometry
from patches.encoding.method import FrequencyMethod, Method
from patches.encoding.recipe import ResolvedRecipe
from patches.encoding.schedule import RopeType
from patches.model.architectures import architecture_of
from patches.model.rotary_tables import RotaryTable, RotaryTables, rotary_tables
from patches.parsing import NOT_OF_THE_ENCODING, PLANES, InvalidEncoding, parse
from patches.registry import FREQUENCIES, METHODS
from patches.rope_parameters import CHUNKS, SCALING, SHARED

FIXED_BASE = "ntk_alpha"
"""Type of a rotary module (HunYuan) whose configuration declares ``dynamic`` and an ``alpha``: one larger base."""

MSCALES = ("short_mscale", "long_mscale")
"""Factors on cos and sin by length, which transformers reads for Phi-MoE alone."""

TRAINED = "original_max_position_embeddings"

BY_LENGTH = (RopeType.DYNAMIC, RopeType.LONGROPE)
"""Types whose rotary module computes its frequencies when it runs: before, nothing can be compared with them."""

WHOLE_PROMPTS = "reference_sliding_attention"
"""Type of layers whose cache keeps all keys of the first forward, and a window of later ones (Unlimited-OCR)."""

NOTHING_ATTENDS = "none of its layers attends: recurrent layers have no positions to encode"
OF_SEVERAL_PARTS = "it is made of several models, and its configuration has no attention heads for all of them"


class UnsupportedModel(ValueError):
    """This model cannot be served with an encoding per request; the message says why."""


def geometry_of(model: nn.Module, table: RotaryTable | None = None) -> RopeGeometry:
    """Geometry of a causal language model, as far as its configuration has it.

    ``table`` is the rotary table that requests choose: without it, that of layers with full attention or the first.

    Raises:
        UnsupportedModel: naming what this model does that the seams cannot carry.
    """
    config = text_config(model)
    architecture = architecture_of(model)
    if number(config, "num_attention_heads") is None:
        raise UnsupportedModel(OF_SEVERAL_PARTS if len(getattr(config, "sub_configs", ())) > 1 else NOTHING_ATTENDS)
    if architecture is None or architecture.forward is None:
        _refuse_attention_that_does_not_dispatch(model)
    facts = {} if architecture is None else architecture.facts(config) | architecture.in_weights(model)
    if table is None:
        table = _table_of(model)
    parameters = _declared(facts, config, table)
    facts.pop("rope_parameters", None)
    declared = facts.pop("native", None)
    if table is None and architecture is None:
        declared = {"method": "none"}  # a measurement confirms it
    native = _native_encoding(config, parameters, declared)
    latent = number(config, "kv_lora_rank") is not None
    longest = facts.pop("max_position_embeddings", None) or getattr(config, "max_position_embeddings", None)
    if longest is None:
        raise UnsupportedModel("its configuration does not say for how many tokens it was trained")
    measured = {
        "head_dim": _head_dim(config, latent),
        "rotary_dim": 0 if table is None else 2 * table.inv_freq.shape[0],
        "rope_theta": 0.0 if parameters is None else float(parameters["rope_theta"]),
        "original_max_position_embeddings": _trained_length(config, parameters or {}, native, int(longest)),
        "max_position_embeddings": int(longest),
        "num_attention_heads": number(config, "num_attention_heads"),
        "family": _family_of(native, parameters),
        "native": native,
        "latent": latent,
        "learned_factors": None if table is None else table.learned_factors,
    }
    geometry = RopeGeometry(**{**measured, **facts})
    if native is None or parameters is None or getattr(config, CHUNKS, None):
        return geometry  # without that entry, the parameters alone are plain RoPE
    return replace(geometry, declared=_read_otherwise(parameters, native, geometry))


def ignored_entries(model: nn.Module) -> list[str]:
    """Names in a checkpoint's ``rope_parameters`` that its encoding does not read, for a model that can be served.

    Raises:
        UnsupportedModel: as ``geometry_of``.
    """
    config, architecture, table = text_config(model), architecture_of(model), _table_of(model)
    facts = {} if architecture is None else architecture.facts(config)
    if getattr(config, "position_encoding", None) or facts.get("native"):
        return []
    parameters = _declared(facts, config, table)
    return [] if parameters is None else _not_read(parameters)


def _table_of(model: nn.Module) -> RotaryTable | None:
    """The rotary table of layers with full attention, or the first."""
    tables = list(tables_of(model))
    return next((one for one in tables if one.layer_type == SHARED), tables[0] if tables else None)


def tables_of(model: nn.Module) -> RotaryTables:
    """The rotary tables of a model; none where a checkpoint does not rotate by those that its class has."""
    architecture = architecture_of(model)
    rotates = architecture is None or architecture.rotates(text_config(model))
    return rotary_tables(model) if rotates else RotaryTables([])


def text_config(model: nn.Module) -> Any:
    """The configuration of the language model itself."""
    config = getattr(model, "config", None)
    if config is None:
        raise UnsupportedModel("the model carries no configuration")
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def tempered_layers(model: nn.Module) -> int:
    """Layers that scale their queries by position outside of the seams, as all of Ministral 3 and Mistral 4 do.

    Those of Mistral Large 4 learn the scale.
    """
    config = text_config(model)
    declared = getattr(config, "rope_parameters", None) or {}
    if declared.get("llama_4_scaling_beta"):
        return int(config.num_hidden_layers)
    learned = (part for part in model.modules() if isinstance(getattr(part, "softmax_scaling", None), nn.Module))
    return len({part.layer_idx for part in learned})


def chunked_layers(config: Any) -> dict[int, int]:
    """Layer -> tokens per chunk, for layers that attend within chunks (Llama 4)."""
    kinds = getattr(config, "layer_types", None) or []
    return {index: int(config.attention_chunk_size) for index, kind in enumerate(kinds) if kind == "chunked_attention"}


def unwindowed_layers(config: Any) -> set[int]:
    """Layers whose mask is local, but no sliding window: chunks, and caches that keep the whole prompt."""
    kinds = getattr(config, "layer_types", None) or []
    return chunked_layers(config).keys() | {index for index, kind in enumerate(kinds) if kind == WHOLE_PROMPTS}


def dispatches(model: nn.Module) -> bool:
    """True if the attention of this model or part of a model, beside that of its parts, dispatches by name."""
    can_set = getattr(model, "_can_set_attn_implementation", None)
    return can_set is not None and bool(can_set())


def _refuse_attention_that_does_not_dispatch(model: nn.Module) -> None:
    """Parts that no text reaches, such as a vision tower, may do as they like."""
    config = text_config(model)
    parts = (part for part in model.modules() if hasattr(part, "_can_set_attn_implementation"))
    if not dispatches(next((part for part in parts if getattr(part, "config", None) is config), model)):
        raise UnsupportedModel(
            "its attention does not dispatch by name, and has no entry in patches/model/architectures"
        )


def refuse_other_frequencies(table: RotaryTable, native: ResolvedRecipe) -> None:
    """Raises:
    UnsupportedModel: when the checkpoint's own encoding, as resolved here, is not what its rotary module computes.
    """
    if native.length is not None or not native.rotates:
        return  # a module that depends on the length rewrites its frequencies when it runs
    own, resolved = table.turns.cpu(), torch.tensor(native.inv_freq, dtype=torch.float32)
    tolerance = max(1e-4, 8 * torch.finfo(table.inv_freq.dtype).eps)
    if own.shape != resolved.shape or not torch.allclose(own, resolved, rtol=tolerance, atol=0.0):
        raise UnsupportedModel(
            f"its rotary module rotates by frequencies down to {float(own[-1]):.3g}, and its configuration says "
            f"{native.inv_freq[-1]:.3g}"
        )


def _declared(facts: dict[str, Any], config: Any, table: RotaryTable | None) -> dict[str, Any] | None:
    """``rope_parameters`` as an architecture has them, else those of the table; None without any."""
    own: dict[str, Any] | None = facts.get("rope_parameters")
    return _rope_parameters(config, table) if own is None and table is not None else own


def _rope_parameters(config: Any, table: RotaryTable) -> dict[str, Any]:
    """Parameters of the rotary table that requests choose."""
    parameters = getattr(getattr(table.module, "config", config), "rope_parameters", None) or {}
    if table.layer_type in parameters:
        # transformers looks for "truncate" beside the layer types (5.24), so what a type says has no effect.
        return {name: value for name, value in parameters[table.layer_type].items() if name != "truncate"}
    if "rope_theta" not in parameters:
        raise UnsupportedModel("its configuration has no rope_parameters for its rotary module")
    if getattr(table.module, "rope_type", None) == FIXED_BASE:
        return {"rope_type": "ntk", "rope_theta": parameters["rope_theta"], "factor": parameters["alpha"]}
    return dict(parameters)


def _head_dim(config: Any, latent: bool) -> int:
    """Numbers per head as the configuration has them; a measurement replaces it where layers differ."""
    if latent:
        return int((number(config, "qk_nope_head_dim") or 0) + (number(config, "qk_rope_head_dim") or 0))
    if (head_dim := number(config, "head_dim")) is not None:
        return head_dim
    return int(config.hidden_size // config.num_attention_heads)


def number(config: Any, name: str) -> int | None:
    """A whole number of a configuration, 0 where layers differ, None where it has no such number."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # transformers names no number for layers that differ
        return 0
    return None if value is None else int(value)


def _native_encoding(config: Any, parameters: dict[str, Any] | None, declared: Any) -> Method | None:
    """The checkpoint's own encoding, None for plain RoPE.

    Raises:
        UnsupportedModel: when we have no such method.
    """
    fields = getattr(config, "position_encoding", None) or declared or _in_chunks(config, parameters)
    if fields is None:
        if parameters is None:
            raise UnsupportedModel("its configuration names no positional encoding that we know")
        if parameters.get("rope_type", "default") == "default":
            return None
        without_effect = {*NOT_OF_THE_ENCODING, *_not_read(parameters)}
        fields = {name: value for name, value in parameters.items() if name not in without_effect}
        if scales := [name for name in MSCALES if name in fields]:
            raise UnsupportedModel(f"its native encoding {fields!r} is not one we carry: {scales[0]} has no effect")
    fields = dict(fields)
    known = METHODS[fields["rope_type"]].model_fields if fields.get("rope_type") in METHODS else fields
    if TRAINED not in known:  # the trained length, which has its own place
        fields.pop(TRAINED, None)
    if fields.get("rope_type") in FREQUENCIES.keys() - {"proportional"}:  # the width is that of the table
        fields.pop("partial_rotary_factor", None)
    if fields.get("rope_type") == "dynamic":  # transformers scales from this length, whatever else is given
        fields[TRAINED] = config.max_position_embeddings
    try:
        return parse(fields)
    except InvalidEncoding as error:
        raise UnsupportedModel(f"its native encoding {fields!r} is not one we carry: {error}") from error


def _in_chunks(config: Any, parameters: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Declared dual chunk attention as request fields; None for a checkpoint without it.

    The rotation is that of dual_chunk_rope.py in vLLM, the temperature that of its dual_chunk_flash_attn.py.

    Raises:
        UnsupportedModel: when the entry lacks a size, or another entry scales the frequencies.
    """
    entries = getattr(config, CHUNKS, None)
    if not entries:
        return None
    if parameters is None or parameters.get("rope_type", RopeType.DEFAULT) != RopeType.DEFAULT:
        raise UnsupportedModel(f"{CHUNKS} is for plain RoPE, and its configuration has another encoding: remove one")
    if not isinstance(entries, Mapping):
        raise UnsupportedModel(f"its {CHUNKS} is no object")
    if missing := [name for name in ("chunk_size", "local_size") if entries.get(name) is None]:
        raise UnsupportedModel(f"its {CHUNKS} has no {' and no '.join(missing)}")
    fields = {"method": "dual_chunk", "chunk_size": entries["chunk_size"], "local_window": entries["local_size"]}
    return fields | ({"attention_temperature": "reserved_length"} if entries.get(TRAINED) else {})


def _read_otherwise(parameters: Mapping[str, Any], native: Method, geometry: RopeGeometry) -> Method | None:
    """The method that ``rope_parameters`` ask for as a request, where it is another than ``native``; None elsewhere."""
    try:
        asked = parse(parameters)
    except InvalidEncoding:  # no request can send them
        return None
    try:
        alike = type(asked) is type(native) and asked.parameters(geometry) == native.parameters(geometry)
    except ValueError:  # the share of a head counts otherwise
        alike = asked == native
    return None if alike else asked


def _not_read(parameters: dict[str, Any]) -> list[str]:
    """Names that no encoding of this type reads. By their frequencies, a model's own module is asked if it does.

    Those that scale are left to be refused where nothing can be compared.
    """
    kind = parameters.get("rope_type", RopeType.DEFAULT)
    if kind not in METHODS:
        return []
    read = {*METHODS[kind].model_fields, *NOT_OF_THE_ENCODING, "rope_type", TRAINED}
    read -= {"method", "attention_temperature"}  # ours alone
    if kind in BY_LENGTH:
        read |= SCALING - {"type"}
    if parameters.get("type") in (kind, PLANES):
        read.add("type")
    return sorted(name for name, value in parameters.items() if value is not None and name not in read)


def _trained_length(config: Any, parameters: dict[str, Any], native: Method | None, longest: int) -> int:
    """Length of the training before any scaling; every ``factor`` is relative to it."""
    chunks = getattr(config, CHUNKS, None) or {}
    declared = parameters.get(TRAINED) or getattr(config, TRAINED, None) or chunks.get(TRAINED)
    if declared:
        return int(declared)
    if native is not None and parameters.get("rope_type") == "linear":
        # By convention such a checkpoint declares the length after interpolation and keeps no other. Vicuna's and
        # LongChat's declare that beside the trained one.
        factor = float(parameters["factor"])
        after = getattr(config, "max_sequence_length", None)
        return longest if after == round(factor * longest) else max(2, round(longest / factor))
    return longest


def _family_of(native: Method | None, parameters: dict[str, Any] | None) -> Family:
    if native is None or (parameters is not None and isinstance(native, FrequencyMethod)):
        return "rotary"
    return METHODS[native.method].family
