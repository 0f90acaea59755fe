"""Fused operations in the place of a model's own, which they call outside of steps on the Triton kernel."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from patches.model.fusion import launch
from patches.model.fusion.active import is_fusing
from patches.model.fusion.detection import activation_of, norm_of, rotations_of
from patches.model.fusion.forms import Activation, Layout, Norm, Rotation
from patches.model.fusion.projections import joined_forwards
from patches.model.fusion.residual import Known, summing, taken

ROTATION = "apply_rotary_pos_emb"
"""Name of the function that turns queries and keys, beside the classes of attention that call it."""


Found = TypeVar("Found")

Replace = Callable[[nn.Module, Callable[..., Any], ExitStack], None]
"""Replaces the forward of a module, until the stack closes."""


def fuse(model: nn.Module, undo: ExitStack, replace: Replace) -> None:
    """Fuse operations in steps on the Triton kernel, until ``undo`` closes. Other forwards compute the same bits."""
    norms = measured(model, norm_of)
    every: list[tuple[nn.Module, Callable[..., Any]]] = list(fused_forwards(model, norms))
    every.extend(summing(model, norms))
    for module, fused in every:
        replace(module, fused, undo)
    for joined, forwards in joined_forwards(model):
        undo.callback(joined.separate)
        for module, fused in forwards:
            replace(module, fused, undo)
    for namespace in rotating(model):
        undo.enter_context(rotation_fused(namespace))


def fused_forwards(model: nn.Module, norms: Known) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """(module, its fused forward) of each of ``norms`` and each gated product of ``model`` that a kernel computes."""
    for module, (form, eps) in norms.items():
        yield module, partial(_normed, module, module.forward, form, eps)
    for module, activation in measured(model, activation_of).items():
        yield module, partial(_gated, module, module.forward, activation)


def measured(model: nn.Module, measure: Callable[[nn.Module], Found | None]) -> dict[nn.Module, Found]:
    """Modules of ``model`` in which ``measure`` finds something. A forward that a library put there stays.

    Modules of one class and with the same settings are measured once.
    """
    known: dict[Hashable, Found | None] = {}
    found = {}
    for module in model.modules():
        if "forward" not in vars(module):
            key = _settings(module), _settings(module._modules.get("act_fn"))
            if key not in known:
                known[key] = measure(module)
            if (one := known[key]) is not None:
                found[module] = one
    return found


def _settings(module: nn.Module | None) -> Hashable:
    """The class of a module and its public attributes: plain values, and the identities of all others."""
    if module is None:
        return None
    public = sorted((name, value) for name, value in vars(module).items() if not name.startswith("_"))
    plain = (bool, int, float, str, type(None))
    values = tuple((name, value if isinstance(value, plain) else id(value)) for name, value in public)
    return type(module), values, tuple(module._modules), tuple(module._parameters), tuple(module._buffers)


def _normed(module: nn.Module, original: Callable[..., Any], form: Norm, eps: float, *args: Any, **kwargs: Any) -> Any:
    if is_fusing() and not module.training and len(args) == 1 and not kwargs:
        normed = taken(module, args[0])
        if normed is None:
            normed = launch.rms_norm(args[0], module.weight, eps, form)  # type: ignore[arg-type]
        if normed is not None:
            return normed
    return original(*args, **kwargs)


def _gated(module: Any, original: Callable[..., Any], activation: Activation, *args: Any, **kwargs: Any) -> Any:
    if not is_fusing() or module.training or len(args) != 1 or kwargs:
        return original(*args, **kwargs)
    gate, up = module.gate_proj(args[0]), module.up_proj(args[0])
    product = launch.gated(gate, up, activation)
    return module.down_proj(module.act_fn(gate) * up if product is None else product)


def rotating(model: nn.Module) -> list[ModuleType]:
    """The Python modules of the classes in ``model`` that contain a function of rotation."""
    names = dict.fromkeys(type(module).__module__ for module in model.modules())
    found = [sys.modules[name] for name in names if name in sys.modules]
    return [module for module in found if callable(getattr(module, ROTATION, None))]


@dataclass
class _Shared:
    """The replaced function of one Python module. ``users`` counts the models that are patched."""

    original: Callable[..., Any]
    fused: Callable[..., Any]
    users: int = 0


_shared: dict[str, _Shared] = {}
_lock = threading.Lock()


@contextmanager
def rotation_fused(module: ModuleType) -> Iterator[None]:
    """Within it, the function of rotation in ``module`` is fused; models of one family share the replacement."""
    with _lock:
        shared = _shared.get(module.__name__)
        if shared is None:
            original = getattr(module, ROTATION)
            forms = rotations_of(original)
            fused = wraps(original)(partial(_rotated, original, forms)) if forms else original
            shared = _shared[module.__name__] = _Shared(original, fused)
            setattr(module, ROTATION, fused)
        shared.users += 1
    try:
        yield
    finally:
        with _lock:
            shared.users -= 1
            if not shared.users:
                del _shared[module.__name__]
                if getattr(module, ROTATION) is shared.fused:  # else another library has replaced it since
                    setattr(module, ROTATION, shared.original)


def _rotated(original: Callable[..., Any], forms: dict[Layout, Rotation], *args: Any, **kwargs: Any) -> Any:
    """``original(q, k, cos, sin)``; other arguments are for ``original`` only."""
    plain = len(args) == 4 and kwargs in ({}, {"unsqueeze_dim": 1})
    if is_fusing() and plain and all(isinstance(each, torch.Tensor) for each in args):
        q, k, cos, sin = args
        layout = launch.layout_of(q, k, cos, sin)
        form = None if layout is None else forms.get(layout)
        if form is not None:
            return launch.rotate(q, k, cos, sin, form)
    return original(*args, **kwargs)
