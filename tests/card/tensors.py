"""Tensors of the card, and the ways of numbers between it and the host."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from tests.card.kernels import KERNELS
from tests.card.streams import CARD


class CardTensor(torch.Tensor):
    """A tensor of the card; its numbers are in ``host``."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> CardTensor:
        made: CardTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype, device=CARD
        )
        made.host = host
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("tensors of the card are for use inside of `card`")


def _host(one: Any) -> Any:
    return one.host if isinstance(one, CardTensor) else one


def on_card(one: Any) -> Any:
    """A tensor of the host as one of the card, without a copy; anything else as it is."""
    return CardTensor(one) if isinstance(one, torch.Tensor) and not isinstance(one, CardTensor) else one


def of_host(func: Any, args: Any, kwargs: Any) -> tuple[Callable[..., Any], Any, Any]:
    """An operation of torch, its arguments and its named ones, on the numbers of its tensors."""
    numbers = mapped(_host, kwargs)
    if numbers.get("device") is not None:
        numbers["device"] = torch.device("cpu")
    return KERNELS.get(func.overloadpacket.__name__, func), mapped(_host, args), numbers


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """As torch's ``tree_map``, see ``leaves``."""
    if isinstance(tree, tuple):
        return tuple([mapped(change, each) for each in tree])
    if isinstance(tree, list):
        return [mapped(change, each) for each in tree]
    if isinstance(tree, dict):
        return {name: mapped(change, each) for name, each in tree.items()}
    return change(tree)


def upload(model: torch.nn.Module) -> None:
    """Move a model to the card, in place."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                moved = on_card(weight.detach())
                module._parameters[name] = torch.nn.Parameter(moved, requires_grad=False)
        for name, buffer in module._buffers.items():
            module._buffers[name] = on_card(buffer)


def download(value: Any) -> Any:
    """``value`` with the numbers of the card on the host: tensors, and objects that have some."""
    if isinstance(value, CardTensor):
        return value.host
    if isinstance(value, list | tuple | dict):
        return tree_map(download, value)
    if type(value).__module__.startswith("patches.") and hasattr(value, "__dict__"):
        moved = copy.copy(value)
        moved.__dict__.update({name: download(each) for name, each in vars(value).items()})
        return moved
    return value


def is_card(one: object) -> bool:
    return isinstance(one, torch.device | str) and torch.device(one).type == "cuda"


def names_card(one: object) -> bool:
    """True for an argument of ``Tensor.to`` that says it is the card."""
    return isinstance(one, CardTensor) or is_card(one)
