"""Forwards that a model runs before it is patched, by which it is measured and checked.

Works without a model library.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from patches.model.architectures import architecture_of
from patches.model.measuring.geometry import UnsupportedModel, geometry_of, tables_of, text_config
from patches.model.measuring.trial import TOKENS
from patches.model.rotary_tables import RotaryTable, TableFormat, TableLayout, layout_of, orders_of

BIDIRECTIONAL = "its attention is bidirectional: tokens see later ones"


def table_format(table: RotaryTable) -> TableFormat:
    """Format of the model's own rotary table, whose ``order`` is measured too."""
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
    layout = _layout_of(whole, position, RotaryTable(module, table.layer_type), table)
    if layout is None:
        raise UnsupportedModel("its rotary module returns a table in no layout that we know")
    return TableFormat(layout, isinstance(half, torch.Tensor) or half[0].dtype == torch.float32, by_plane)


def _layout_of(output: Any, position: torch.Tensor, copied: RotaryTable, table: RotaryTable) -> TableLayout | None:
    """Layout of what the module of ``copied`` returned. ``table`` learns in which order its pairs turn."""
    factor, kept = _factor_of(output), copied.inv_freq
    for order in (None, *orders_of(output, kept)):
        copied.order = table.order = order
        if (layout := layout_of(output, position, copied.turns, factor)) is not None:
            return layout
    return None


def _factor_of(table: Any) -> float:
    """The factor on the cos and sin of a model's own table. Phi-MoE applies another than its module names."""
    cos, sin = (table.real, table.imag) if isinstance(table, torch.Tensor) else table[:2]
    return float(torch.hypot(cos.flatten()[0].float(), sin.flatten()[0].float()))


@torch.no_grad()
def logits_of(
    model: Any,
    most: int = TOKENS,
    *,
    distinct: bool = True,
    first: int | None = None,
    ends: bool = True,
    encoding: Mapping[str, Any] = MappingProxyType({}),
) -> torch.Tensor:
    """Logits of ``most`` tokens at most, different ones or the last of them throughout, from position ``first`` on.

    Without ``ends``, the last token is another one. ``encoding`` is the keyword argument of a patched model.
    The embedding of a padding token is zero in many models, and zero does not turn.
    """
    vocab_size = int(text_config(model).vocab_size)
    length = min(most, geometry_of(model).table_rows or most)
    tokens = torch.linspace(1, vocab_size - 1, length, device=model.device).long()[None]
    tokens = tokens if distinct else tokens[:, -1:].expand(1, length)
    if not ends:
        tokens = torch.cat([tokens[:, :-1], tokens[:, :1]], 1)
    positions = (
        {} if first is None else {"position_ids": torch.arange(first, first + length, device=model.device)[None]}
    )
    output = model(input_ids=tokens, use_cache=False, **positions, **encoding)
    logits: torch.Tensor | None = getattr(output, "logits", None)
    if logits is None or logits.ndim != 3:
        lacks = "no logits" if logits is None else "no logits of each token"
        raise UnsupportedModel(f"{type(model).__name__} returns {lacks}: load it with AutoModelForCausalLM")
    return logits


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
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
def refusing(what: str) -> Iterator[None]:
    """Raises:
    UnsupportedModel: when a forward fails inside; the message says ``what`` and why.
    """
    try:
        yield
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel(f"{what}: {error}") from error


def refuse_positions_added_to_tokens(model: Any) -> None:
    """Raises:
    UnsupportedModel: when the first layer of a model gets equal tokens unlike, or no states [rows, tokens, ...].
    """
    entering: list[torch.Tensor] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        entering.extend(value for value in states[:1] if value.is_floating_point() and value.ndim > 2)

    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layers in lists for layer in layers]
    try:
        tokens = logits_of(model, distinct=False).shape[1]
    finally:
        for hook in hooks:
            hook.remove()
    first = next((states for states in entering if states.shape[1] == tokens), None)
    if first is None:
        raise UnsupportedModel("no states [rows, tokens, ...] enter its layers, so its positions cannot be measured")
    if not torch.equal(first, first[:, :1].expand_as(first)):
        raise UnsupportedModel("it adds positions to its tokens in a way that we do not know")


def refuse_bidirectional(model: Any, plain: torch.Tensor, rounding: float) -> None:
    """Raises:
    UnsupportedModel: when another last token changes the ``plain`` logits before it.
    """
    if plain.shape[1] > 1 and not relative_difference(logits_of(model, ends=False)[:, :-1], plain[:, :-1]) <= rounding:
        raise UnsupportedModel(BIDIRECTIONAL)


def computes_its_own_encoding(model: Any) -> bool:
    """False for weights trained with an encoding that transformers does not compute."""
    config, architecture = text_config(model), architecture_of(model)
    agrees = architecture is None or architecture.agrees(config)
    return agrees and getattr(config, "position_encoding", None) is None


def relative_difference(logits: torch.Tensor, plain: torch.Tensor) -> float:
    """The largest, in largest logits."""
    finite = plain.isfinite()
    return float((logits - plain)[finite].abs().max() / plain[finite].abs().max())


class OtherLogits(UnsupportedModel):
    """The patched logits of ``tokens`` differ from the plain ones by ``difference`` of the largest."""

    def __init__(self, tokens: int, difference: float) -> None:
        super().__init__(
            "its attention computes more than the queries, keys and values that it hands on. Under its own encoding, "
            f"the patched logits differ by {difference:.2g} of the largest"
        )
        self.tokens, self.difference = tokens, difference


def refuse_other_logits(logits: torch.Tensor, plain: torch.Tensor, rounding: float) -> None:
    """Raises:
    OtherLogits: when the patched model computes something else than the plain one.
    """
    difference = relative_difference(logits, plain)
    if not difference <= rounding:  # not NaN either
        raise OtherLogits(logits.shape[1], difference)
