"""Linear layers that multiply by the fastest product for each number of rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from service.models.linear.products import Product, plain, products_by
from service.models.linear.timing import fastest

UNBOUNDED = 1 << 62
EDGES = {1: 1, 4: 2, 64: 16, UNBOUNDED: 256}
"""Rows up to which one product is taken -> rows for which it is timed: one stream, some, many, and prompts."""

Choice = tuple[tuple[int, Product], ...]
"""(rows up to which it is taken, product), in order; the last is unbounded."""


class ChosenLinear(nn.Linear):
    """A linear layer with the parameters of ``linear`` and the products of ``choice``.

    They are for inference: where gradients are on, ``plain`` multiplies, since not every product has one.
    """

    def __init__(self, linear: nn.Linear, choice: Choice = ((UNBOUNDED, plain),)) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias, self.choice = linear.weight, linear.bias, choice
        self.training = linear.training

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., out_features] of [..., in_features] in the dtype of the weight."""
        rows = input.numel() // self.in_features
        if rows == 0 or torch.is_grad_enabled():
            return plain(self, input)
        return next(product for most, product in self.choice if rows <= most)(self, input)


def use_fastest(model: nn.Module) -> None:
    """Replace the linear layers of a model on a CPU for which some product is faster than ``F.linear``.

    Their outputs differ in the last bits.
    """
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    chosen = {linear: ChosenLinear(linear) for linear in linears if len(products_by(linear)) > 1}
    choose(chosen.values())
    replace(model, {linear: layer for linear, layer in chosen.items() if any(p is not plain for _, p in layer.choice)})


def choose(layers: Iterable[ChosenLinear], *preferred: Product) -> None:
    """Time the products that each of ``layers`` has, after ``preferred``, and give it the fastest ones."""
    alike: dict[tuple[Product, ...], list[ChosenLinear]] = defaultdict(list)
    for layer in layers:
        alike[products_by(layer)].append(layer)
    for products, group in alike.items():
        choice = tuple((most, fastest(group, rows, *preferred, *products)) for most, rows in EDGES.items())
        for layer in group:
            layer.choice = choice


def replace(model: nn.Module, layers: Mapping[nn.Linear, ChosenLinear]) -> None:
    """Put ``layers`` into the places of their keys, under all names of a layer that has several."""
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if isinstance(child, nn.Linear) and child in layers:
                setattr(module, name, layers[child])


def products_of(model: nn.Module) -> list[str]:
    """Products of the model's layers other than ``plain``, with their rows: "by_groups up to 1"."""
    layers = [module for module in model.modules() if isinstance(module, ChosenLinear)]
    chosen = {(most, product.__name__) for layer in layers for most, product in layer.choice if product is not plain}
    return [name if most == UNBOUNDED else f"{name} up to {most}" for most, name in sorted(chosen)]
