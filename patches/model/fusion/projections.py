"""Projections of one input as one product: on a card, small ones take as long as larger ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from patches.model.fusion.active import is_fusing

NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module that read the same numbers."""


class _Last(threading.local):
    """The input of this thread's last product, and the parts of its output that nobody has asked for yet."""

    def __init__(self) -> None:
        self.x: torch.Tensor | None = None
        self.parts: dict[int, torch.Tensor] = {}


class Joined:
    """Several linear layers of one input. Their weights become parts of one matrix, so they need no memory twice."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        self._layers, self._sizes, self._last = layers, [layer.out_features for layer in layers], _Last()
        self.weight = torch.cat([layer.weight.data for layer in layers])
        self.bias = None if layers[0].bias is None else torch.cat([layer.bias.data for layer in layers])
        for name, joined in (("weight", self.weight), ("bias", self.bias)):
            if joined is not None:
                for layer, part in zip(layers, joined.split(self._sizes), strict=True):
                    getattr(layer, name).data = part
        self._addresses = self._read_addresses()

    @property
    def is_current(self) -> bool:
        """False once a layer has other memory: its new numbers are not here."""
        return self._read_addresses() == self._addresses

    def _read_addresses(self) -> list[int]:
        every = [parameter for layer in self._layers for parameter in (layer.weight, layer.bias)]
        return [parameter.data_ptr() for parameter in every if parameter is not None]

    def part(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """Output of layer ``number`` for ``x`` [..., in_features]; all are computed for the first that asks."""
        last = self._last
        if last.x is not x or number not in last.parts:
            last.x, last.parts = x, dict(enumerate(F.linear(x, self.weight, self.bias).split(self._sizes, -1)))
        part = last.parts.pop(number)
        if not last.parts:
            last.x = None
        return part

    def separate(self) -> None:
        """Give every layer its own memory again."""
        for layer in self._layers if self.is_current else ():
            for parameter in layer.parameters():
                parameter.data = parameter.data.clone()


def joined_forwards(model: nn.Module) -> Iterator[tuple[Joined, list[tuple[nn.Module, Callable[..., Any]]]]]:
    """The joined projections of ``model``, where all of a module's are ordinary, with their forwards."""
    for module, names in product(list(model.modules()), NAMES):
        layers: list[Any] = [module._modules.get(name) for name in names]
        if are_ordinary(layers):
            joined = Joined(layers)
            yield joined, [(each, partial(_projected, joined, n, each.forward)) for n, each in enumerate(layers)]


def are_ordinary(layers: list[Any]) -> bool:
    """True for linear layers of one input and one kind, whose weights nobody shares and which nothing has changed."""
    if not all(type(layer) is nn.Linear and "forward" not in vars(layer) for layer in layers):
        return False
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    if not all(is_own(each) for each in (*weights, *biases) if each is not None):
        return False
    kinds = {(weight.dtype, weight.device, weight.shape[1]) for weight in weights}
    has_hooks = any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
    return len(kinds) == 1 and len({bias is None for bias in biases}) == 1 and not has_hooks


def is_own(parameter: nn.Parameter) -> bool:
    """True if nothing else has the memory of a parameter. Adapters share that of their base."""
    if type(parameter) is not nn.Parameter or type(parameter.data) is not torch.Tensor:
        return False
    storage, count = parameter.untyped_storage(), getattr(torch._C, "_storage_Use_Count", None)
    users = None if count is None else count(storage._cdata)
    return storage.nbytes() == parameter.nbytes and users == 2  # the parameter, and ``storage``


def _projected(joined: Joined, number: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if is_fusing() and len(args) == 1 and not kwargs and joined.is_current:
        return joined.part(number, args[0])
    return original(*args, **kwargs)
