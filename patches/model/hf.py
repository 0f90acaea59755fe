"""Putting the seams into a transformers model, and measuring it. The only file that imports transformers.

Seam A: the rotary module's ``forward`` is replaced on the instance.
Seam B: attention and mask functions are registered under a new name.
Seam C: the ``forward`` of a module that embeds absolute positions is replaced on the instance.
The model's own ``forward`` is replaced likewise, by one that opens and ends the state of each forward.
All are undone on leaving the context, also after an exception. A request never patches anything.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from patches.attention.paged.batch import runs_triton
from patches.encoding.recipe import AttentionTemperature
from patches.model.architectures import MaskKind, Seams, architecture_of
from patches.model.encodings import with_keyword
from patches.model.fusion.replacement import fuse
from patches.model.generation import generate
from patches.model.measuring.geometry import (
    UnsupportedModel,
    dispatches,
    geometry_of,
    refuse_other_frequencies,
    tables_of,
    text_config,
)
from patches.model.measuring.measurement import Measurement, measured
from patches.model.measuring.rounding import allowed_rounding
from patches.model.measuring.trial import TOKENS, Trial
from patches.model.rotary_tables import RotaryTable, RotaryTables, TableFormat, layout_of
from patches.model.seams import Patched

_names = itertools.count()
_PREFIX = "ropeway_"
"""Prefix of the attention's registered name. With "flash" in it, transformers would look for a kernel."""


def _mask(
    seams: Seams,
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **arguments: Any,
) -> torch.Tensor | None:
    """Mask function registered beside the attention: passes the padding mask on, and builds nothing.

    A model that chooses keys by its mask, or adds keys, gets a whole one [rows, 1, q_length, kv_length].
    """
    kind = seams.mask_kind(insists=not allow_is_causal_skip)
    if kind is not None:
        arguments |= {"attention_mask": attention_mask, "allow_is_causal_skip": False}
        build = eager_mask if kind == "numbers" else sdpa_mask
        whole = build(batch_size, q_length, kv_length, **arguments)
        assert whole is not None, "it was not to be left out"
        return seams.built(whole)
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask


def _no_mask(
    batch_size: int, q_length: int, kv_length: int, *, attention_mask: torch.Tensor | None = None, **_: Any
) -> torch.Tensor:
    """Mask function of models whose attention we replace: they expect a tensor, and never read it.

    For static caches, ``generate`` calls it before the forward, which reads the padding.
    """
    return torch.empty(0) if attention_mask is None else attention_mask


def _table_format(table: RotaryTable) -> TableFormat:
    """Format of the model's own rotary table."""
    module = copy.deepcopy(table.module)  # a length-dependent one rewrites its buffers when it runs
    device = table.inv_freq.device
    position = torch.arange(TOKENS, device=device)[None]

    def output(dtype: torch.dtype, position: torch.Tensor) -> Any:
        return module(torch.zeros(1, 1, 1, dtype=dtype, device=device), position, *table.arguments)

    with torch.no_grad():
        whole, half = (output(dtype, position) for dtype in (torch.float32, torch.bfloat16))
        try:
            by_plane = output(torch.float32, position.expand(3, 1, TOKENS))[0].ndim > whole[0].ndim
        except (RuntimeError, IndexError):  # it takes plain positions only
            by_plane = False
    copied = RotaryTable(module, table.layer_type)
    layout = layout_of(whole, position, copied.inv_freq, copied.attention_scaling)
    if layout is None:
        raise UnsupportedModel("its rotary module returns a table in no layout that we know")
    return TableFormat(layout, isinstance(half, torch.Tensor) or half[0].dtype == torch.float32, by_plane)


def _measured(model: PreTrainedModel, attention_name: str) -> Measurement:
    """Find out how the model rotates, by running it.

    Raises:
        UnsupportedModel: when it rotates in a way that the seams cannot carry.
    """
    geometry_of(model)  # says first what needs no forward
    tables = tables_of(model)
    formats: dict[RotaryTable | None, TableFormat] = {None: TableFormat()}
    formats |= {table: _table_format(table) for table in tables}

    def run(
        frequencies: Mapping[RotaryTable | None, torch.Tensor],
        tokens: int = TOKENS,
        mask: MaskKind | None = None,
        first: int | None = None,
    ) -> Trial:
        trial = Trial(frequencies, tables, formats, tokens, mask)
        with ExitStack() as undo:
            _put(model, attention_name, tables, trial, undo)
            with _refused("its forward fails with another attention"):
                _logits(model, tokens, first=first)
        return trial

    if not formats.keys() - {None} and architecture_of(model) is None:
        _refuse_positions_added_to_tokens(model)
        if "position_ids" in inspect.signature(model.forward).parameters and run({}, first=1).moved(run({}, first=0)):
            raise UnsupportedModel("its layers rotate in a way that we do not know")
    return measured(run, tables, formats, partial(geometry_of, model))


def _refuse_positions_added_to_tokens(model: PreTrainedModel) -> None:
    """Raises:
    UnsupportedModel: when the first layer of a model gets equal tokens unlike.
    """
    entering: list[torch.Tensor] = []

    def note(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        entering.extend(value for value in states[:1] if value.is_floating_point() and value.ndim == 3)

    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layers in lists for layer in layers]
    try:
        _logits(model, distinct=False)
    finally:
        for hook in hooks:
            hook.remove()
    if not entering or not torch.equal(entering[0], entering[0][:, :1].expand_as(entering[0])):
        raise UnsupportedModel("it adds positions to its tokens in a way that we do not know")


@torch.no_grad()
def _logits(
    model: PreTrainedModel, most: int = TOKENS, *, distinct: bool = True, first: int | None = None
) -> torch.Tensor:
    """Logits of ``most`` tokens at most, different ones or the last of them throughout, from position ``first`` on.

    The embedding of a padding token is zero in many models, and zero does not turn.
    """
    vocab_size = int(text_config(model).vocab_size)
    length = min(most, geometry_of(model).table_rows or most)
    tokens = torch.linspace(1, vocab_size - 1, length, device=model.device).long()[None]
    tokens = tokens if distinct else tokens[:, -1:].expand(1, length)
    positions = (
        {} if first is None else {"position_ids": torch.arange(first, first + length, device=model.device)[None]}
    )
    output = model(input_ids=tokens, use_cache=False, **positions)
    if not hasattr(output, "logits"):
        raise UnsupportedModel(f"{type(model).__name__} returns no logits: load it with AutoModelForCausalLM")
    logits: torch.Tensor = output.logits
    return logits


@contextmanager
def patched(model: PreTrainedModel) -> Iterator[Patched]:
    """Within it, ``model`` takes an encoding per row; leaving restores it bit-exactly.

    ``Patched.encoding`` gives the keyword argument. Gradients flow through every method, except into T5's table, whose
    values are read here. Outside, the argument has no meaning: ``generate`` refuses it, and a forward may ignore it.
    Under biases, Intel's processors are faster after ``torch.set_flush_denormal(True)``.

    Raises:
        UnsupportedModel: when the model cannot be carried, or wraps another one; it is then left untouched.
        ValueError: when it is patched already.
    """
    _refuse_wrapper(model)
    if str(text_config(model)._attn_implementation).startswith(_PREFIX):
        raise ValueError("the model is patched already: one patch serves every encoding")
    name = f"{_PREFIX}{next(_names)}"
    with ExitStack() as undo:
        with _evaluating(model):
            with _refused("its own forward fails"):
                plain = _logits(model) if _computes_its_own_encoding(model) else None
                rounding = allowed_rounding(model, lambda: _logits(model), _difference)
            measurement = _measured(model, name)
            if plain is not None and measurement.tokens > TOKENS:
                plain = _logits(model, measurement.tokens)
            patch = Patched(model, name, measurement, _take_over_temperatures(model, undo))
        for table in patch.rotary_tables.chosen[:1]:
            refuse_other_frequencies(table, patch.slots[0])
        _put(model, name, patch.rotary_tables, patch, undo)
        if patch.embedding is not None:
            _replace_forward(patch.embedding.module, patch.embed, undo)
        if runs_triton(model.device):
            fuse(model, undo, _replace_forward)
        forward = wraps(model.forward)(partial(patch.run, model.forward))
        forward.__signature__ = with_keyword(model.forward)  # type: ignore[attr-defined]
        _replace_forward(model, forward, undo)
        if hasattr(model, "generate"):
            own: Any = model.generate
            _replace(model, "generate", wraps(own)(partial(generate, own, model.generation_config)), undo)
        if plain is not None:
            with _evaluating(model), _refused("its forward fails with another attention"):
                _refuse_other_logits(_logits(model, measurement.tokens), plain, rounding)
        yield patch


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """No dropout and no autocast inside; then every module and every rotary table is as it was.

    Tables that depend on the length are made anew by a forward. Autocast rounds more than checks of the model allow.
    """
    training = [module for module in model.modules() if module.training]
    tables = [(module, dict(vars(module)), dict(module._buffers)) for module in tables_of(model).modules]
    numbers = [
        (buffer, buffer.clone()) for _, _, buffers in tables for buffer in buffers.values() if buffer is not None
    ]
    model.eval()
    try:
        with torch.autocast(model.device.type, enabled=False):
            yield
    finally:
        for module in training:
            module.training = True
        for module, *former in tables:
            for now, before in zip((vars(module), module._buffers), former, strict=True):
                now.clear()
                now.update(before)
        for buffer, number in numbers:
            buffer.copy_(number)


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """Raises:
    UnsupportedModel: when a forward fails inside; the message says ``what`` and why.
    """
    try:
        yield
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel(f"{what}: {error}") from error


def _computes_its_own_encoding(model: PreTrainedModel) -> bool:
    """False for weights trained with an encoding that transformers does not compute."""
    config, architecture = text_config(model), architecture_of(model)
    agrees = architecture is None or architecture.agrees(config)
    return agrees and getattr(config, "position_encoding", None) is None


def _difference(logits: torch.Tensor, plain: torch.Tensor) -> float:
    """The largest, in largest logits."""
    finite = plain.isfinite()
    return float((logits - plain)[finite].abs().max() / plain[finite].abs().max())


def _refuse_other_logits(logits: torch.Tensor, plain: torch.Tensor, rounding: float) -> None:
    """Raises:
    UnsupportedModel: when the patched model computes something else than the plain one.
    """
    difference = _difference(logits, plain)
    if not difference <= rounding:  # not NaN either
        raise UnsupportedModel(
            "its attention computes more than the queries, keys and values that it hands on. Under its own encoding, "
            f"the patched logits differ by {difference:.2g} of the largest"
        )


def _refuse_wrapper(model: object) -> None:
    """``generate`` of a wrapper, such as peft's, runs the model inside."""
    if not isinstance(model, PreTrainedModel):
        inside = "its get_base_model()" if hasattr(model, "get_base_model") else "the transformers model inside"
        raise UnsupportedModel(f"{type(model).__name__} is no PreTrainedModel: patch {inside}")
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{type(model).__name__} has an encoder and a decoder; only a decoder alone can be patched"
        )


def _put(model: PreTrainedModel, attention_name: str, tables: RotaryTables, seams: Seams, undo: ExitStack) -> None:
    """Put seams A and B into the model, until ``undo`` closes."""
    architecture, original = architecture_of(model), model.config._attn_implementation
    by_name = architecture is None or architecture.forward is None
    mask = partial(_mask, seams) if by_name else _no_mask
    for interface, function in ((AttentionInterface, seams.attention), (AttentionMaskInterface, mask)):
        interface.register(attention_name, function)
        undo.callback(interface._global_mapping.pop, attention_name, None)
    for module in tables.modules:
        _replace_forward(module, partial(seams.rotary, module=module), undo)
    if architecture is None or architecture.forward is None:
        parts = _parts_that_attend(model)
        undo.callback(model.set_attn_implementation, {name: part._attn_implementation for name, part in parts.items()})
        model.set_attn_implementation(dict.fromkeys(parts, attention_name))
        return
    model.config._attn_implementation = attention_name
    undo.callback(setattr, model.config, "_attn_implementation", original)
    for module in model.modules():
        if type(module).__name__ in architecture.attention:
            _replace_forward(module, partial(architecture.forward, seams, module), undo)


def _parts_that_attend(model: PreTrainedModel) -> dict[str, Any]:
    """Configurations of the whole and of its language model, by transformers' names for them.

    Without the whole where only the language model dispatches its attention by name.
    """
    config, text = model.config, text_config(model)
    whole = {"": config} if dispatches(model) else {}
    return whole | {name: text for name in config.sub_configs if getattr(config, name) is text}


def _take_over_temperatures(model: Any, undo: ExitStack) -> dict[int, AttentionTemperature]:
    """Switch off the temperatures that layers compute by counting tokens; returns them by layer, as functions of
    positions."""
    architecture = architecture_of(model)
    temperatures: dict[int, AttentionTemperature] = {}
    if architecture is None:
        return temperatures
    for module in model.modules():
        own = architecture.temperature(module)
        if own is not None:
            undo.callback(setattr, module, own.attribute, getattr(module, own.attribute))
            setattr(module, own.attribute, own.value)
            temperatures[module.layer_idx] = own.temperature
    return temperatures


def _replace_forward(module: torch.nn.Module, forward: Any, undo: ExitStack) -> None:
    """Replace ``forward`` on the instance; a forward that a library put there comes back."""
    _replace(module, "forward", forward, undo)


def _replace(module: torch.nn.Module, name: str, method: Any, undo: ExitStack) -> None:
    hooked = module.__dict__.get(name)

    def restore() -> None:
        module.__dict__.pop(name, None)
        if hooked is not None:
            setattr(module, name, hooked)

    undo.callback(restore)
    setattr(module, name, method)
