"""The form of a model's operation, found by running it beside the forms. An operation that fits none is left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import nn

from patches.model.fusion.forms import DTYPES, Activation, Layout, Norm, Rotation

PROJECTIONS = {"gate_proj", "up_proj", "down_proj"}

EQUAL = 0.99
"""Share of numbers in half precision that equal those of the right form. Another place of rounding changes a third."""


def norm_of(module: nn.Module) -> tuple[Norm, float] | None:
    """Form and epsilon of a norm with one vector of weights and nothing else; None for other modules."""
    weight = module._parameters.get("weight")
    others = [each for name, each in module._parameters.items() if name != "weight" and each is not None]
    eps = _first(module, "variance_epsilon", "eps")
    if others or module._modules or module._buffers or type(weight) is not nn.Parameter:
        return None
    if weight.ndim != 1 or not isinstance(eps, float):
        return None
    try:
        return next(((form, eps) for form in Norm if _is_norm(module, form, eps)), None)
    except Exception:  # it is called in another way
        return None


@torch.no_grad()
def _is_norm(module: nn.Module, form: Norm, eps: float) -> bool:
    """Small inputs show the place of epsilon."""
    random, stand_in = _Random(module), copy.deepcopy(module).eval()
    weight = stand_in.get_parameter("weight")
    for dtype, scale in product(DTYPES, (1.0, eps**0.5)):
        weight.data = random(weight.shape, dtype)
        x = random((3, 5, *weight.shape), dtype) * scale
        if not agree(type(module).forward(stand_in, x), form.computed(x, weight, eps)):
            return False
    return True


def activation_of(module: nn.Module) -> Activation | None:
    """Activation of ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``; None for modules that compute anything else."""
    act = getattr(module, "act_fn", None)
    if module._modules.keys() - {"act_fn"} != PROJECTIONS or not callable(act) or module._parameters or module._buffers:
        return None
    try:
        if any(dict(each.named_parameters()) for each in (act,) if isinstance(each, nn.Module)):
            return None
        form = next((form for form in Activation if _is_activation(act, form, module)), None)
        return form if form is not None and _is_gated(module, act) else None
    except Exception:  # it is called in another way
        return None


@torch.no_grad()
def _is_activation(act: Callable[[torch.Tensor], torch.Tensor], form: Activation, module: nn.Module) -> bool:
    x = torch.linspace(-12, 12, 1001, device=next(module.parameters()).device)
    return all(agree(act(x.to(dtype)), form.computed(x.to(dtype))) for dtype in DTYPES)


@torch.no_grad()
def _is_gated(module: nn.Module, act: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Its forward runs over small projections."""
    stand_in, random = copy.copy(module), _Random(module)
    for dtype in DTYPES:
        gate, up, down = (random.linear(*sizes, dtype) for sizes in ((8, 12), (8, 12), (12, 8)))
        stand_in.__dict__["_modules"] = {**module._modules, "gate_proj": gate, "up_proj": up, "down_proj": down}
        stand_in.training = False
        x = random((2, 5, 8), dtype)
        if not agree(type(module).forward(stand_in, x), down(act(gate(x)) * up(x))):
            return False
    return True


def rotations_of(function: Callable[..., Any]) -> dict[Layout, Rotation]:
    """Forms of ``function(q, k, cos, sin)`` by the layout of its inputs, without layouts in which it has none."""
    found = {}
    for states, by_pair in product(DTYPES, (False, True)):
        for tables in {states, torch.float32}:
            layout = Layout(states, tables, by_pair)
            try:
                form = next((form for form in Rotation if _is_rotation(function, layout, form)), None)
            except Exception:  # it is called in another way, or takes no such tables
                continue
            if form is not None:
                found[layout] = form
    return found


@torch.no_grad()
def _is_rotation(function: Callable[..., Any], layout: Layout, form: Rotation) -> bool:
    """Queries and keys are views of [tokens, heads, dim], and no number of a table equals another."""
    random = _Random()
    q, k = (random((1, 5, heads, 8), layout.states).transpose(1, 2) for heads in (3, 2))
    cos, sin = (random((1, 5, 4 if layout.by_pair else 8), layout.tables) for _ in range(2))
    found = function(q, k, cos, sin)
    expected = [form.computed(x, cos, sin, layout.by_pair) for x in (q, k)]
    return isinstance(found, tuple) and len(found) == 2 and all(map(agree, found, expected))


def agree(found: Any, expected: torch.Tensor) -> bool:
    """True for tensors of one shape and dtype whose numbers differ by the order of sums at most."""
    if not isinstance(found, torch.Tensor) or (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return False
    if expected.dtype == torch.float32:
        return torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
    same = (found == expected).float().mean()
    return bool(same >= EQUAL) and torch.allclose(found, expected, rtol=0.02, atol=1e-3)


class _Random:
    """Random tensors on the device of ``module``; torch's own generators stay as they are."""

    def __init__(self, module: nn.Module | None = None) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._device = torch.device("cpu") if module is None else next(module.parameters()).device

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self._device, dtype)

    def linear(self, inputs: int, outputs: int, dtype: torch.dtype) -> nn.Linear:
        layer = nn.Linear(inputs, outputs, bias=False, device="meta")
        layer.weight = nn.Parameter(self((outputs, inputs), dtype))
        return layer


def _first(module: nn.Module, *names: str) -> Any:
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)
