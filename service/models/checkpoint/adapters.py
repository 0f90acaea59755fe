"""LoRA adapters (arXiv:2106.09685) beside their base, each merged into a copy of it.

A copy shares the matrices that its adapter leaves unchanged, so it costs the changed ones and a cache. A request
chooses it by name. One batch has one set of weights, so the tokens equal those of the merged model alone.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog
import torch

from service.models.checkpoint.configuration import OF_ADAPTER
from service.models.checkpoint.declared_encoding import declare_encoding, read_object
from service.models.checkpoint.loading import Checkpoint, ModelLoadError
from service.models.linear.layers import undo

CONFIG, WEIGHTS = OF_ADAPTER, "adapter_model.safetensors"
"""Files of an adapter, as peft writes them."""

CHANGES_THE_BASE = ("pissa", "corda", "olora", "lora_ga", "loftq")
"""Beginnings of ``init_lora_weights`` of adapters that were trained over other weights than those of their base."""

CHANGED = {"base_layer", "modules_to_save"}
"""peft's names of what it adds to, and of copies that it replaces. A layer with another bias alone has neither."""

log = structlog.get_logger()


@dataclass(frozen=True)
class Adapter:
    """An adapter to serve as ``name``."""

    name: str
    folder: Path


def by_base(folders: Mapping[str, Path], served: Mapping[str, object]) -> dict[str, list[Adapter]]:
    """Adapters by the name of their base in ``served``; ``folders`` are by the names of the adapters.

    Raises:
        ModelLoadError: when a name is taken, a folder is no LoRA adapter, or its base is not served.
    """
    found: dict[str, list[Adapter]] = {}
    for name, folder in folders.items():
        adapter = Adapter(name, folder)
        with _blamed(adapter):
            if name in served:
                raise ValueError("a served model has this name")
            found.setdefault(_base_of(adapter, served), []).append(adapter)
    return found


def _base_of(adapter: Adapter, served: Mapping[str, object]) -> str:
    """The served model of the name that the adapter's configuration declares, or the only one.

    Raises:
        ValueError: when a file is missing or of another kind, or several models are served and none has the name.
    """
    for file in (CONFIG, WEIGHTS):
        if not (adapter.folder / file).is_file():
            raise ValueError(f"its folder has no {file}")
    config = read_object(adapter.folder / CONFIG)
    if config.get("peft_type") != "LORA":
        raise ValueError(f"its peft_type is {config.get('peft_type')!r}, and only 'LORA' is served")
    if config.get("ensure_weight_tying"):
        raise ValueError("it has ensure_weight_tying, and only adapters of untied weights are served")
    if config.get("layer_replication"):
        raise ValueError("it has layer_replication, and only adapters with the layers of their base are served")
    start = str(config.get("init_lora_weights")).lower()
    if start.startswith(CHANGES_THE_BASE):
        raise ValueError(
            f"its init_lora_weights is {start!r}, which changes the weights of the base; convert it with peft's "
            "path_initial_model_for_weight_conversion"
        )
    declared = config.get("base_model_name_or_path") or ""
    named = [name for name in served if Path(name).name == Path(declared).name]
    if len(named) == 1:
        return named[0]
    if len(served) > 1:
        raise ValueError(f"its base is {declared!r}, and the served models are {', '.join(served)}")
    (only,) = served
    log.warning("adapter_base_differs", adapter=adapter.name, declared=declared, served=only)
    return only


@contextmanager
def _blamed(adapter: Adapter) -> Iterator[None]:
    """Raises:
    ModelLoadError: for any error inside, naming the setting and the adapter, in one line.
    """
    try:
        yield
    except Exception as error:  # peft fails in as many ways as a file can be wrong
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelLoadError(
            f"ROPEWAY_ADAPTERS: adapter {adapter.name!r} in {str(adapter.folder)!r} cannot be loaded: {reason}"
        ) from error


def adapted(base: Checkpoint, adapter: Adapter) -> Checkpoint:
    """The merged model of ``adapter``, with the encoding that its folder declares; ``base`` stays unchanged.

    Raises:
        ModelLoadError: when peft is not installed, the weights do not fit the base, or the base is quantized.
    """
    with _blamed(adapter):
        if getattr(base.model.config, "quantization_config", None) is not None:
            raise ValueError(f"its base {base.name!r} is a quantized checkpoint, and merging needs full precision")
        model = _merged(_sharing_copy(base.model), adapter.folder)
        if hasattr(model.config, "position_encoding_variants"):
            model.config.position_encoding_variants = {}  # they have the base's weights
        declare_encoding(model, adapter.folder)
    return replace(base, name=adapter.name, model=model.eval(), base=base.name)


def _sharing_copy(model: Any) -> Any:
    """A copy with other parameters over the same memory.

    Tied weights are two parameters in it: a LoRA of the embedding leaves the output layer unchanged.
    """
    copied = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    for module in copied.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(parameter.detach(), requires_grad=False))
    return copied


def _merged(model: Any, folder: Path) -> Any:
    """``model`` with the adapter's weights added to those it changes. Nothing is written into the shared memory.

    Raises:
        ValueError: when peft is not installed, or tensors are missing, unknown or not numbers.
    """
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    was_tied = model.config.get_text_config().tie_word_embeddings
    wrapped, weights = _with_adapter(model, folder)
    _add_in_float32(wrapped, weights)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All adapters are already merged", UserWarning)
        merged = wrapped.merge_and_unload(safe_merge=True)  # the other kinds of layers, also into new tensors
    for name, parameter in merged.named_parameters():
        if parameter.dtype != dtypes[name]:  # adapters are often in float32
            parameter.data = parameter.data.to(dtypes[name])
    inputs, outputs = merged.get_input_embeddings(), merged.get_output_embeddings()
    if was_tied and outputs is not None and torch.equal(outputs.weight, inputs.weight):
        outputs.weight = inputs.weight  # tied again
    return merged


def _with_adapter(model: Any, folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """peft's model over ``model``, which is untied from here on, and the weights of the adapter's file.

    Layers that the adapter changes have plain weights.

    Raises:
        ValueError: when peft is not installed, or tensors are missing or unknown.
    """
    try:
        from peft import PeftConfig, get_peft_model, load_peft_weights, set_peft_model_state_dict
    except ImportError as error:
        raise ValueError("adapters need the package peft (the extra `adapters`)") from error
    config = PeftConfig.from_pretrained(str(folder))
    config.inference_mode, config.base_model_name_or_path = True, None
    weights = load_peft_weights(str(folder), device=str(model.device))
    with warnings.catch_warnings():
        # peft 0.21 reads a name that transformers 5.24 deprecates.
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)
        # Tied weights are two parameters here. The configuration still says tied: so peft gives tokens that were
        # trained in the embedding to the output layer too.
        warnings.filterwarnings("ignore", "Model has .tie_word_embeddings=True.", UserWarning)
        wrapped: Any = get_peft_model(model, config, low_cpu_mem_usage=True)
    undo(wrapped, lambda name: not CHANGED.isdisjoint(name.split(".")))
    model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = False
    # Weights are assigned in this mode. Otherwise peft copies biases and embeddings over those of the base.
    result: Any = set_peft_model_state_dict(wrapped, weights, low_cpu_mem_usage=True)
    # Tokens of a tied output layer are those of the embedding, and are saved once.
    tied = tuple(f"{name}." for name, part in wrapped.named_modules() if getattr(part, "tied_adapter", None))
    # "default" is the adapter's name in peft.
    missing = [key for key in result.missing_keys if "default" in key.split(".") and not key.startswith(tied)]
    if missing or result.unexpected_keys:
        first, what = (missing[0], "is missing") if missing else (result.unexpected_keys[0], "has no place in the base")
        raise ValueError(f"{len(missing) + len(result.unexpected_keys)} tensors do not fit, the first: {first} {what}")
    return wrapped, weights


def _add_in_float32(adapted: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Merge linear layers and embeddings, one at a time, in float32: each sum is rounded once.

    peft rounds the adapter's ``weights`` to the base's number format as it takes them. It rounds their product before
    the sum, and then the sum.
    """
    from peft.tuners.lora import Embedding, Linear

    for name, layer in adapted.named_modules():
        if not isinstance(layer, Embedding | Linear):
            continue
        for own, parameter in layer.named_parameters():
            saved = f"{name}.{own.replace('.default', '')}"  # DoRA's magnitudes are saved without the last part
            exact = weights.get(saved, weights.get(saved.removesuffix(".weight")))
            if exact is not None:
                parameter.data = exact.float()
        weight: Any = layer.get_base_layer().weight
        dtype = weight.dtype
        weight.data = weight.data.float()
        layer.merge(safe_merge=True)  # safe: a new tensor, and no NaN
        weight.data = weight.data.to(dtype)
