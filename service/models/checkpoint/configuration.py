"""The configuration of a checkpoint, read once and checked before anything is built by it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from patches import RopeType, is_by_layer

FILE, OF_ADAPTER = "config.json", "adapter_config.json"
LENGTH, LENGTH_BEFORE = "max_position_embeddings", "original_max_position_embeddings"
ROTATION = ("rope_parameters", "rope_scaling")
"""The names of the object that describes rotation; the second one is from before transformers 5."""

NUMBERS = (
    *("factor", "attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"),
    *("mscale", "mscale_all_dim", "partial_rotary_factor"),
)
"""Entries of that object that are numbers, or null."""

LISTS = ("short_factor", "long_factor")


def refuse_without(folder: Path) -> None:
    """Raises:
    ValueError: when the folder is no checkpoint of a whole model.
    """
    if (folder / FILE).exists():
        return
    more = ""
    if (folder / OF_ADAPTER).exists():
        more = f"; it is an adapter: serve its base model with --adapter {folder.absolute().name}={folder}"
    elif any(file.suffix.lower() == ".gguf" for file in folder.iterdir()):
        more = ", and GGUF files are not loaded"
    raise ValueError(f"the folder has no {FILE}{more}")


def read(place: str | Path, revision: str | None) -> PreTrainedConfig:
    """The configuration in a folder or of a Hugging Face id. Custom code is not run.

    Raises:
        ValueError: naming the field that cannot be used, with its allowed values.
    """
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(place, revision=revision, trust_remote_code=False)
    except Exception:
        declared: Any = PreTrainedConfig.get_config_dict(place, revision=revision)[0]
        if not isinstance(declared, Mapping):
            raise ValueError("it is no JSON object") from None
        _refuse_an_unknown_type(declared)
        for name, rotation in _rotations(declared):
            refuse_rotation(rotation, name)
        raise
    text: Any = config.get_text_config()
    known = {"default", text.default_rope_type, *ROPE_INIT_FUNCTIONS}
    rotation = getattr(text, ROTATION[0], None)
    refuse_rotation(rotation, ROTATION[0], known)
    if isinstance(rotation, Mapping) and not is_by_layer(rotation):
        _refuse_lists(rotation, text)
    length_of(vars(text), text.attribute_map.get(LENGTH, LENGTH))  # XLNet has a property of this name, -1
    return config


def _refuse_an_unknown_type(declared: Mapping[str, Any]) -> None:
    kind = declared.get("model_type")
    if kind is None:
        raise ValueError("it has no model_type")
    if kind not in list(CONFIG_MAPPING):
        raise ValueError(
            f"model_type {kind!r} is none that transformers {transformers.__version__} has, "
            "and custom code of a checkpoint is not run"
        )


def _rotations(declared: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Name and content of each description of rotation, in the configurations of parts too."""
    for name, value in declared.items():
        if name in ROTATION:
            yield name, value
        elif name == "rope_theta" and value is not None:
            yield name, {name: value}
        elif isinstance(value, Mapping):
            yield from _rotations(value)


def refuse_rotation(rotation: Any, name: str, known: Collection[str] | None = None) -> None:
    """Refuse ``rope_parameters`` with values that no type takes; ``known`` are the types, if they are checked.

    Raises:
        ValueError: naming the entry and its allowed values.
    """
    if not rotation:
        return
    if not isinstance(rotation, Mapping):
        raise ValueError(f"{name} {rotation!r} is no object")
    if is_by_layer(rotation):
        for layers, own in rotation.items():
            if isinstance(own, Mapping):
                refuse_rotation(own, f"{name}.{layers}", known)
        return
    kind = rotation.get("rope_type", rotation.get("type", "default"))
    if not isinstance(kind, str) or (known is not None and kind not in known):
        allowed = "no name" if known is None else f"none of {', '.join(sorted(known))}"
        raise ValueError(f"{name}.rope_type {kind!r} is {allowed}")
    if "rope_theta" in rotation:
        refuse_a_base(rotation["rope_theta"], "rope_theta" if name == "rope_theta" else f"{name}.rope_theta")
    for entry in NUMBERS:
        if rotation.get(entry) is not None and not _is_number(rotation[entry]):
            raise ValueError(f"{name}.{entry} {rotation[entry]!r} is no finite number")
    length_of(rotation, LENGTH_BEFORE)


def _refuse_lists(rotation: Mapping[str, Any], text: Any) -> None:
    """Refuse LongRoPE's divisors of frequencies unless there is one for each pair of turned dimensions.

    Raises:
        ValueError: naming the list and its length.
    """
    if rotation.get("rope_type") != RopeType.LONGROPE:
        return
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    pairs = int(width * (rotation.get("partial_rotary_factor") or 1.0)) // 2  # as transformers counts
    for entry in LISTS:
        values = rotation.get(entry)
        if values is not None and not (isinstance(values, list) and all(_is_number(one) and one > 0 for one in values)):
            raise ValueError(f"{ROTATION[0]}.{entry} is no list of finite numbers above 0")
        if values is not None and len(values) != pairs:
            raise ValueError(f"{ROTATION[0]}.{entry} has {len(values)} numbers, and the model turns {pairs} pairs")


def refuse_a_base(theta: Any, name: str = "rope_theta") -> None:
    """Raises:
    ValueError: when no model can rotate by this base.
    """
    if not _is_number(theta) or theta <= 1:
        raise ValueError(f"{name} {theta!r} is no finite number above 1")


def length_of(declared: Mapping[str, Any], name: str) -> int | None:
    """The declared length in tokens, None where there is none.

    Raises:
        ValueError: when it is no number of tokens.
    """
    length = declared.get(name)
    if length is None or (type(length) is int and length > 0):
        return length
    raise ValueError(f"{name} {length!r} is no number of tokens, 1 or more")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
