"""Linear layers that multiply by the fastest product for each number of rows."""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import structlog
import torch
from torch import nn

from service.machine.memory import available_bytes
from service.models.linear.known import Choice, Choices, Kind, known, settled
from service.models.linear.packing import PackedWeight, by_packed, by_sums, pack, width_of
from service.models.linear.products import Product, by_columns, by_groups, by_onednn, plain, products_by
from service.models.linear.samples import BYTES, ROWS, Sample
from service.models.linear.times import GAIN, first_of_fast
from service.models.memory import huge_pages

log = structlog.get_logger()

UNBOUNDED = 1 << 62
FEW = 4
"""Rows up to which ``F.linear`` multiplies bfloat16. For more, it keeps a kernel of oneDNN for each number of rows."""
EDGES: dict[int, tuple[int, set[Product]]] = {
    1: (1, {by_groups, by_sums}),
    2: (2, {by_columns}),
    FEW: (4, {by_columns}),
    64: (ROWS, {by_groups}),
    UNBOUNDED: (256, set()),
}
"""Rows up to which a product is taken -> rows for which it is timed, and products for these alone.

``plain``, ``by_onednn`` and ``by_packed`` may be it everywhere.
"""
READ = re.compile(r"\bself\.(\w+)\.weight\b(?!\.dtype)")
"""A module's Python that reads the weight of a layer, and not just its dtype."""
MOST = 1.5
"""Time of packed weights by that of plain ones, or the inverse, that counts for one number of rows."""


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

    Their outputs differ in the last bits. Weights are packed unless that is slower, and then have no plain copy.
    Without memory for one, it and all others stay plain. Layers with hooks, or with another ``forward``, stay.
    """
    linears = [linear for linear in ordinary(model) if len(products_by(linear)) > 1]
    by_kind = _by_kind(linears)
    kept, has_room = _shared(model) | _read_by_others(model), True
    chosen: dict[nn.Linear, nn.Linear] = {}
    for linear in linears:
        choices = by_kind[_kind(linear)]
        choice, weight = choices.plain, None
        if choices.packed and linear.weight.data_ptr() not in kept:
            has_room = has_room and _has_room(linear.weight.nbytes)
            weight = pack(linear.weight.detach()) if has_room else None
        if choices.packed and weight is not None:  # the plain one is freed before the next one is packed
            choice, linear.weight = choices.packed, nn.Parameter(weight, requires_grad=False)
            huge_pages.advise([weight.span()])
        if any(product is not plain for _, product in choice):
            chosen[linear] = ChosenLinear(linear, choice)
    replace(model, chosen)


def _has_room(size: int) -> bool:
    """True if the memory has room for a packed weight of this ``size`` and a copy that checks it."""
    if available_bytes() >= 2 * size:
        return True
    log.warning("weights_not_packed", bytes=size)
    return False


def undo(model: nn.Module, is_wanted: Callable[[str], bool]) -> None:
    """Give back linear layers with plain weights, as before ``use_fastest``, if the layer's name ``is_wanted``."""
    ordinary_layers: dict[nn.Linear, nn.Linear] = {}
    for name, module in model.named_modules():
        if isinstance(module, ChosenLinear) and is_wanted(name):
            weight = module.weight.plain() if isinstance(module.weight, PackedWeight) else module.weight
            layer = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
            layer.weight, layer.bias = nn.Parameter(weight, requires_grad=False), module.bias
            layer.training = module.training
            ordinary_layers[module] = layer
    replace(model, ordinary_layers)


def ordinary(model: nn.Module) -> list[nn.Linear]:
    """The linear layers of a model that nothing has changed."""
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    return [
        linear
        for linear in linears
        if not (linear._forward_hooks or linear._forward_pre_hooks or "forward" in vars(linear))
    ]


def _shared(model: nn.Module) -> set[int]:
    """Addresses of weights that several modules have, such as tied ones."""
    places = Counter(weight.data_ptr() for module in model.modules() for weight in module.parameters(recurse=False))
    return {place for place, count in places.items() if count > 1}


def _read_by_others(model: nn.Module) -> set[int]:
    """Addresses of layers' weights that the Python of another module reads, such as Mamba's. Each read would copy."""
    names = {kind: _names_of_weights(kind) for kind in set(map(type, model.modules()))}
    read = (module._modules.get(name) for module in model.modules() for name in names[type(module)])
    return {layer.weight.data_ptr() for layer in read if isinstance(layer, nn.Linear)}


@cache
def _names_of_weights(kind: type) -> set[str]:
    """Names of layers whose weight the source of ``kind`` reads."""
    names: set[str] = set()
    for function in filter(inspect.isfunction, vars(kind).values()):  # a class would need its file parsed
        with suppress(OSError, TypeError):  # it has no source
            names |= set(READ.findall(inspect.getsource(function)))
    return names


def _by_kind(linears: Sequence[nn.Linear]) -> dict[Kind, Choices]:
    """The choices of all these layers, timed unless they are known."""
    found = known({_kind(linear) for linear in linears})
    for group in _timed_together([linear for linear in linears if _kind(linear) not in found]):
        choices = _choices(group)
        found.update((_kind(linear), choices) for linear in group)
    return settled(found)


def _timed_together(linears: Sequence[nn.Linear]) -> list[list[nn.Linear]]:
    """Layers by products, dtype, and whether they can be packed. Those of a shape are apart if they exceed a core's
    cache, as in a step."""
    size: Counter[Kind] = Counter()
    for linear in linears:
        size[_kind(linear)] += linear.weight.nbytes
    together: dict[Any, list[nn.Linear]] = defaultdict(list)
    for linear in linears:
        kind = _kind(linear)
        together[kind._replace(shape=None) if size[kind] < BYTES else kind, width_of(linear.weight)].append(linear)
    return list(together.values())


def _kind(linear: nn.Linear) -> Kind:
    return Kind(products_by(linear), linear.weight.shape, linear.weight.dtype, torch.get_num_threads())


def _choices(linears: Sequence[nn.Linear]) -> Choices:
    """Weights are packed unless plain ones are faster, in the mean over the numbers of rows that are timed.

    No number of rows counts more than ``MOST``, so none decides alone, disturbed by another process.
    """
    few, many = Sample(linears), Sample(linears, BYTES * ROWS // EDGES[UNBOUNDED][0])
    plain_choice: list[tuple[int, Product]] = []
    packed_choice: list[tuple[int, Product]] = []
    losses = 0.0
    for most, (rows, special) in EDGES.items():
        sample = few if rows <= ROWS else many
        of_plain, of_packed = _candidates(linears[0], most, special), _packed_candidates(sample, special)
        times = sample.times(rows, of_plain, of_packed)
        best = first_of_fast(times[: len(of_plain)])
        plain_choice.append((most, of_plain[best]))
        if of_packed:
            fast = first_of_fast(times[len(of_plain) :])
            packed_choice.append((most, of_packed[fast]))
            losses += math.log(min(max(times[len(of_plain) + fast] / times[best], 1 / MOST), MOST))
    is_slower = losses > -math.log(GAIN) * len(EDGES)
    return Choices(tuple(plain_choice), tuple(packed_choice) if packed_choice and not is_slower else None)


def _candidates(linear: nn.Linear, most: int, special: set[Product]) -> list[Product]:
    found = [product for product in products_by(linear) if product in special | {plain, by_onednn}]
    if most > FEW and by_onednn in found and linear.weight.dtype != torch.float32:
        found.remove(plain)
    return found


def _packed_candidates(sample: Sample, special: set[Product]) -> list[Product]:
    has_sums = by_sums in special and all(linear.weight.dtype == torch.float32 for linear in sample.packed)
    return [] if not sample.packed else [by_sums, by_packed] if has_sums else [by_packed]


def replace(model: nn.Module, layers: Mapping[nn.Linear, nn.Linear]) -> None:
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
