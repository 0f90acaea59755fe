"""Linear layers that multiply by the fastest product for each number of rows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from service.models.linear.products import Product, by_columns, by_groups, by_onednn, plain, products_by
from service.models.linear.timing import BYTES, fastest

UNBOUNDED = 1 << 62
EDGES: dict[int, tuple[int, set[Product]]] = {
    1: (1, {by_groups}),
    2: (2, {by_columns}),
    4: (4, {by_columns}),
    64: (16, {by_groups}),
    UNBOUNDED: (256, set()),
}
"""Rows up to which a product is taken -> rows for which it is timed, and products for these alone.

``plain`` and ``by_onednn`` may be it everywhere.
"""
FEW = 4
"""Rows up to which a product by the plain weight may replace one by a packed weight."""

Choice = tuple[tuple[int, Product], ...]
"""(rows up to which it is taken, product), in order; the last is unbounded."""


class ChosenLinear(nn.Linear):
    """A linear layer with the parameters of ``linear`` and the products of ``choice``.

    They are for inference: ``plain`` multiplies where gradients or autocast are on, which not every product knows.
    """

    def __init__(self, linear: nn.Linear, choice: Choice = ((UNBOUNDED, plain),)) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias, self.choice = linear.weight, linear.bias, choice
        self.training = linear.training

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., out_features] of [..., in_features] in the dtype of the weight."""
        rows = input.numel() // self.in_features
        if rows == 0 or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return plain(self, input)
        return next(product for most, product in self.choice if rows <= most)(self, input)


def use_fastest(model: nn.Module) -> None:
    """Replace the linear layers of a model on a CPU for which some product is faster than ``F.linear``.

    Their outputs differ in the last bits. Layers with hooks, or with another ``forward``, stay.
    """
    chosen = {linear: ChosenLinear(linear) for linear in ordinary(model) if len(products_by(linear)) > 1}
    choose(chosen.values())
    replace(model, {linear: layer for linear, layer in chosen.items() if any(p is not plain for _, p in layer.choice)})


def ordinary(model: nn.Module) -> list[nn.Linear]:
    """The linear layers of a model that nothing has changed."""
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    return [
        linear
        for linear in linears
        if not (linear._forward_hooks or linear._forward_pre_hooks or "forward" in vars(linear))
    ]


def choose(layers: Iterable[ChosenLinear], packed: Product | None = None) -> None:
    """Give ``layers`` the fastest of their products. Those timed together have the same, found once in a process.

    A ``packed`` product comes before the others, and has none beside it for more than ``FEW`` rows.
    """
    for (products, _), group in _timed_together(list(layers)).items():
        shapes = frozenset(layer.weight.shape for layer in group)
        key = packed, products, shapes, group[0].weight.dtype, torch.get_num_threads()
        if key not in _known:
            _known[key] = _choice(group, products, packed)
        for layer in group:
            layer.choice = _known[key]


def _timed_together(layers: Sequence[ChosenLinear]) -> dict[Any, list[ChosenLinear]]:
    """Layers by products, and by shape if those of a shape exceed a core's cache, as in a step."""
    size: Counter[Any] = Counter()
    for layer in layers:
        size[products_by(layer), layer.weight.shape] += layer.weight.nbytes
    together: dict[Any, list[ChosenLinear]] = defaultdict(list)
    for layer in layers:
        products, shape = products_by(layer), layer.weight.shape
        together[products, shape if size[products, shape] >= BYTES else None].append(layer)
    return together


_known: dict[tuple[Any, ...], Choice] = {}
"""Choices of this process, by products, shapes, dtype and threads. Adapters have those of their model."""


def _choice(layers: Sequence[ChosenLinear], products: Sequence[Product], packed: Product | None) -> Choice:
    choice = []
    for most, (rows, special) in EDGES.items():
        candidates = [product for product in products if product in special | {plain, by_onednn}]
        if most > FEW and by_onednn in candidates and layers[0].weight.dtype != torch.float32:
            candidates.remove(plain)  # it is oneDNN's too, which keeps a kernel for each number of rows
        if packed is not None:
            candidates = [packed, *candidates] if most <= FEW else [packed]
        choice.append((most, fastest(layers, rows, *candidates) if len(candidates) > 1 else candidates[0]))
    return tuple(choice)


def replace(model: nn.Module, layers: Mapping[nn.Linear, ChosenLinear]) -> None:
    """Put ``layers`` into the places of their keys, under all names of a layer that has several."""
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if isinstance(child, nn.Linear) and child in layers:
                setattr(module, name, layers[child])


def products_of(model: nn.Module) -> list[str]:
    """The products of each shape of layers that have chosen: "512x2048: by_groups up to 1, by_onednn"."""
    layers = [module for module in model.modules() if isinstance(module, ChosenLinear)]
    return sorted({f"{layer.out_features}x{layer.in_features}: {_ranges(layer.choice)}" for layer in layers})


def _ranges(choice: Choice) -> str:
    """The products in order, each with the rows up to which it is taken."""
    last = [at for at, (_, product) in enumerate(choice) if at + 1 == len(choice) or choice[at + 1][1] is not product]
    named = [(choice[at][0], choice[at][1].__name__) for at in last]
    return ", ".join(name if most == UNBOUNDED else f"{name} up to {most}" for most, name in named)
