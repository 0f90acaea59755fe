"""Forms of the operations of models, found by measurement; no kernel runs."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from patches.model.fusion.detection import activation_of, norm_of, rotations_of
from patches.model.fusion.forms import Activation, Layout, Norm, Rotation
from patches.model.fusion.replacement import ROTATION, fused_forwards, measured, rotating
from tests.models import tiny_model

NORMS: dict[str, set[Norm]] = {
    "llama": {Norm.ROUNDED_FIRST},
    "qwen3": {Norm.ROUNDED_FIRST},
    "deepseek_v3": {Norm.ROUNDED_FIRST},
    "olmo2": {Norm.ROUNDED_LAST},
    "gpt_oss": {Norm.ROUNDED_LAST},
    "gemma2": {Norm.ONE_MORE},
    "gemma3": {Norm.ONE_MORE},
    "cohere": set(),  # it subtracts the mean
    "bloom": set(),
}
GATED = {
    "llama": {Activation.SILU},
    "gemma2": {Activation.GELU_TANH},
    "phi3": set(),  # one projection for both
    "gpt_oss": set(),
    "bloom": set(),
}


def forwards(model: nn.Module) -> list[tuple[nn.Module, Any]]:
    return list(fused_forwards(model, measured(model, norm_of)))


def found(family: str, kind: type[Any]) -> set[Any]:
    replaced = [fused.args for _, fused in forwards(tiny_model(family)[1])]  # type: ignore[attr-defined]
    return {value for args in replaced for value in args if isinstance(value, kind)}


@pytest.mark.parametrize("family", NORMS)
def test_norms_have_the_form_of_their_family(family: str) -> None:
    assert found(family, Norm) == NORMS[family]


@pytest.mark.parametrize("family", GATED)
def test_gated_products_have_the_activation_of_their_family(family: str) -> None:
    assert found(family, Activation) == GATED[family]


def test_every_norm_and_gated_product_of_a_llama_is_found() -> None:
    model = tiny_model("llama")[1]
    fused = {module for module, _ in forwards(model)}
    assert {type(module).__name__ for module in fused} == {"LlamaRMSNorm", "LlamaMLP"}
    assert len(fused) == 2 * model.config.num_hidden_layers + 1 + model.config.num_hidden_layers


class Epsilon(nn.Module):
    """Adds epsilon to the root."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(32)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x.float() / (x.float().pow(2).mean(-1, keepdim=True).sqrt() + self.eps)).to(x.dtype)


class Raises(Epsilon):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("it needs a residual")


def test_other_norms_are_left_alone() -> None:
    others = Epsilon(), Raises(), nn.LayerNorm(32, bias=False), nn.LayerNorm(32), nn.RMSNorm(32), nn.Linear(4, 4)
    for module in others:
        assert norm_of(module) is None, type(module)
    assert norm_of(nn.RMSNorm(32, eps=1e-6)) == (Norm.ROUNDED_LAST, 1e-6)


def mlp_of(family: str) -> nn.Module:
    return next(module for module in tiny_model(family)[1].modules() if type(module).__name__.endswith("MLP"))


def test_other_gated_products_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp: Any = mlp_of("llama")
    assert activation_of(mlp) is Activation.SILU
    for act in (nn.GELU(), nn.ReLU(), nn.PReLU()):
        mlp.act_fn = act
        assert activation_of(mlp) is None
    mlp.act_fn = nn.SiLU()
    ordinary = type(mlp).forward
    monkeypatch.setattr(type(mlp), "forward", lambda self, x: 1.01 * ordinary(self, x))
    assert activation_of(mlp) is None


def test_measuring_changes_nothing() -> None:
    model = tiny_model("llama")[1]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state, attributes = torch.get_rng_state(), [dict(vars(module)) for module in model.modules()]
    forwards(model)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert [dict(vars(module)) for module in model.modules()] == attributes


def rotation_of(family: str) -> tuple[ModuleType, dict[Layout, Rotation]]:
    (module,) = rotating(tiny_model(family)[1])
    return module, rotations_of(getattr(module, ROTATION))


@pytest.mark.parametrize(("family", "by_pair"), [("llama", False), ("gemma3", False), ("gpt_oss", True)])
def test_rotations_round_every_product(family: str, by_pair: bool) -> None:
    module, forms = rotation_of(family)
    assert module is sys.modules[f"transformers.models.{family}.modeling_{family}"]
    half = Layout(torch.bfloat16, torch.bfloat16, by_pair)
    assert forms[half] is Rotation.ROUNDED_PRODUCTS
    assert {layout.by_pair for layout in forms} == {by_pair}
    assert Layout(torch.bfloat16, torch.float32, by_pair) not in forms, "states would become float32"


def test_a_rotation_in_float32_rounds_the_sum() -> None:
    assert rotation_of("olmo2")[1][Layout(torch.bfloat16, torch.float32, False)] is Rotation.ROUNDED_SUM


def test_interleaved_rotations_are_left_alone() -> None:
    assert rotation_of("cohere")[1] == {}
    assert rotation_of("glm4")[1] == {}
    assert rotating(tiny_model("bloom")[1]) == []
