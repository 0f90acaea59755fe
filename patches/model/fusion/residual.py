"""Sums and the norms that read them, as one kernel. A layer's last sum goes to the first norm of the next layer."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from typing_extensions import override

from patches.model.fusion import launch
from patches.model.fusion.active import is_fusing
from patches.model.fusion.forms import Norm

Known = Mapping[nn.Module, tuple[Norm, float]]
"""The form and the epsilon of each norm that a kernel computes."""


class Norms(NamedTuple):
    """Names of a layer's norms: before its attention and its MLP, and behind each where there are such."""

    attention: str
    mlp: str
    behind_attention: str | None = None
    behind_mlp: str | None = None

    @property
    def names(self) -> set[str]:
        return {name for name in self if name is not None}


FORMS = (
    Norms("input_layernorm", "post_attention_layernorm"),
    Norms(
        *("input_layernorm", "pre_feedforward_layernorm"), *("post_attention_layernorm", "post_feedforward_layernorm")
    ),
)
"""Norms of layers that compute ``h = x + attention(norm(x))`` and ``h + mlp(norm(h))``."""


class _Last(threading.local):
    """The last sum that this thread has computed together with a norm of it."""

    norm: nn.Module | None = None
    total: torch.Tensor | None = None
    normed: torch.Tensor | None = None


_last = _Last()


def taken(norm: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """The output of ``norm`` for ``x``, if it was computed with this sum; else None. It is given once."""
    normed = _last.normed if _last.norm is norm and _last.total is x else None
    _last.norm = _last.total = _last.normed = None
    return normed


@dataclass(frozen=True)
class Layer:
    """A layer of one of the ``FORMS``. ``following`` is the norm that reads its output."""

    module: nn.Module
    norms: Norms
    following: nn.Module | None
    known: Known
    original: Callable[..., Any]

    def __call__(self, *args: Any, **arguments: Any) -> Any:
        """The layer's forward. Arguments by name are those of its attention."""
        if len(args) != 1 or not is_fusing() or self.module.training:
            return self.original(*args, **arguments)
        modules, (hidden,) = self.module._modules, args
        normed = self._norm(self.norms.attention)(hidden)
        attended = modules["self_attn"](hidden_states=normed, **arguments)[0]  # type: ignore[misc]
        if self.norms.behind_attention is not None:
            attended = self._norm(self.norms.behind_attention)(attended)
        hidden = self._sum(hidden, attended, self._norm(self.norms.mlp))
        output = modules["mlp"](self._norm(self.norms.mlp)(hidden))  # type: ignore[misc]
        output = output[0] if isinstance(output, tuple) else output
        if self.norms.behind_mlp is not None:
            output = self._norm(self.norms.behind_mlp)(output)
        changes = bool(self.module._forward_hooks)  # what reads the output reads that of the hooks
        return self._sum(hidden, output, None if changes else self.following)

    def _norm(self, name: str) -> nn.Module:
        norm = self.module._modules[name]
        assert norm is not None
        return norm

    def _sum(self, hidden: torch.Tensor, added: torch.Tensor, norm: nn.Module | None) -> torch.Tensor:
        """``hidden + added``, and the output of ``norm`` for it where a kernel computes both."""
        if norm is not None and norm in self.known:
            form, eps = self.known[norm]
            both = launch.added_norm(hidden, added, norm.weight, eps, form)  # type: ignore[arg-type]
            if both is not None:
                _last.norm, (_last.total, _last.normed) = norm, both
                return both[0]
        return hidden + added


def summing(model: nn.Module, known: Known) -> Iterator[tuple[nn.Module, Layer]]:
    """(layer, its fused forward) of ``model``. A forward that a library put there stays."""
    for parent in model.modules():
        layers = parent._modules.get("layers")
        every = list(layers) if isinstance(layers, nn.ModuleList) else []
        for layer, following in zip(every, [*every[1:], parent], strict=False):
            norms = None if "forward" in vars(layer) else norms_of(layer)
            if norms is None or not any(layer._modules[name] in known for name in norms.names):
                continue
            after = following._modules.get("norm" if following is parent else norms.attention)
            yield layer, Layer(layer, norms, after, known, layer.forward)


def is_plain(layer: nn.Module, norms: Norms) -> bool:
    """True if ``layer`` has the modules of a form and no others, and no hooks wait for outputs of its norms."""
    modules = layer._modules
    return modules.keys() == {"self_attn", "mlp", *norms.names} and not any(
        hooks
        for name in norms.names
        for hooks in (modules[name]._forward_hooks, modules[name]._forward_pre_hooks)  # type: ignore[union-attr]
    )


def norms_of(layer: nn.Module) -> Norms | None:
    """The norms of a layer whose forward computes one of the ``FORMS``; None for other layers."""
    for norms in FORMS:
        if is_plain(layer, norms):
            try:
                return norms if _computes(layer, norms) else None
            except Exception:  # it is called in another way
                return None
    return None


class _Step(nn.Module):
    """A function in the place of a part of a layer. It remembers its arguments."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.given: dict[str, Any] = {}

    @override
    def forward(self, hidden_states: torch.Tensor, **given: Any) -> Any:
        self.given = given
        return self.function(hidden_states)


@torch.no_grad()
def _computes(layer: nn.Module, norms: Norms) -> bool:
    """The forward runs over such functions, and all other arguments must reach the attention as they are.

    In float16, some numbers are too large: a layer may treat them.
    """
    numbers = torch.randn((3, 5, 8), generator=torch.Generator().manual_seed(0))
    large = torch.where(numbers > 1.0, 65504.0, numbers).half()
    return all(_agrees(layer, norms, each) for each in (numbers, large))


def _agrees(layer: nn.Module, norms: Norms, x: torch.Tensor) -> bool:
    steps = {name: _Step(partial(_curved, number)) for number, name in enumerate(sorted(norms.names))}
    attention, mlp = _Step(lambda x: (_curved(7, x), None)), _Step(partial(_curved, 9))
    changed = copy.copy(layer)
    changed.__dict__["_modules"] = {"self_attn": attention, "mlp": mlp, **steps}
    changed.training = False
    names = ("attention_mask", "position_embeddings", "position_ids", "cache", "use_cache", "other")
    arguments = {name: object() for name in names}
    found = type(layer).forward(changed, x, **arguments)

    def through(name: str | None, x: torch.Tensor) -> torch.Tensor:
        return x if name is None else steps[name].function(x)

    total = x + through(norms.behind_attention, _curved(7, through(norms.attention, x)))
    total = total + through(norms.behind_mlp, _curved(9, through(norms.mlp, total)))
    same = isinstance(found, torch.Tensor) and torch.allclose(found, total, rtol=0, atol=0, equal_nan=True)
    return same and attention.given == arguments and not any(each.given for each in (mlp, *steps.values()))


def _curved(number: int, x: torch.Tensor) -> torch.Tensor:
    """Another function for each ``number``. It adds enough to overflow float16 near its end."""
    return torch.atan(x * (1.0 + number)) + 100.0 * number + 32.0
