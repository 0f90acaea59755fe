"""Fused kernels against their forms in torch, on a GPU or under Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import pytest
import torch

from patches.model.fusion import launch
from patches.model.fusion.forms import DTYPES, Activation, Layout, Norm, Rotation
from tests.kernels import device_of_kernels

pytestmark = [pytest.mark.slow, pytest.mark.gpu]
DEVICE = device_of_kernels()

every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def equals(found: torch.Tensor | None, expected: torch.Tensor, share: float = 0.995, atol: float = 1e-6) -> None:
    """A sum or an exponential in another order may change the last bit of a few numbers, of 1 - ``share`` at most."""
    assert found is not None
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert torch.allclose(found, expected, rtol=1e-5 if found.dtype == torch.float32 else 0.01, atol=atol)
    if found.dtype != torch.float32:
        assert (found == expected).float().mean() > share


@every_dtype
@pytest.mark.parametrize("form", Norm)
@pytest.mark.parametrize("width", [5, 96, 4096])
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_a_norm_rounds_as_its_form(dtype: torch.dtype, form: Norm, width: int, scale: float) -> None:
    x, weight = random(1, 3, width, dtype=dtype) * scale, random(width, dtype=dtype, seed=1)
    equals(launch.rms_norm(x, weight, 1e-6, form), form.computed(x, weight, 1e-6))


def test_a_norm_keeps_the_order_of_heads_in_memory() -> None:
    x, weight = random(1, 7, 3, 16, dtype=torch.bfloat16).transpose(1, 2), random(16, dtype=torch.bfloat16, seed=1)
    found = launch.rms_norm(x, weight, 1e-6, Norm.ONE_MORE)
    equals(found, Norm.ONE_MORE.computed(x, weight, 1e-6))
    assert found is not None
    assert found.stride() == x.stride()


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_norm_of_heads_in_a_joined_product(tokens: int, transposed: bool) -> None:
    """Queries lie beside keys and values."""
    joined, weight = random(1, tokens, 6 * 16, dtype=torch.bfloat16), random(16, dtype=torch.bfloat16, seed=1)
    x = joined.split((4 * 16, 2 * 16), -1)[0].view(1, tokens, 4, 16)
    x = x.transpose(1, 2) if transposed else x
    found = launch.rms_norm(x, weight, 1e-6, Norm.ROUNDED_FIRST)
    assert found is not None
    equals(found, Norm.ROUNDED_FIRST.computed(x, weight, 1e-6))
    narrow = launch.rms_norm(joined[..., :16], weight, 1e-6, Norm.ROUNDED_FIRST)
    assert narrow is not None
    equals(narrow, Norm.ROUNDED_FIRST.computed(joined[..., :16], weight, 1e-6))


@every_dtype
@pytest.mark.parametrize("form", Norm)
@pytest.mark.parametrize("width", [96, 4096])
def test_a_sum_and_its_norm_round_as_two_operations(dtype: torch.dtype, form: Norm, width: int) -> None:
    x, added = (random(1, 3, width, dtype=dtype, seed=seed) for seed in (0, 2))
    weight = random(width, dtype=dtype, seed=1)
    found = launch.added_norm(x, added, weight, 1e-6, form)
    assert found is not None
    assert torch.equal(found[0], x + added)
    equals(found[1], form.computed(x + added, weight, 1e-6))


@every_dtype
@pytest.mark.parametrize("form", Rotation)
@pytest.mark.parametrize("by_pair", [False, True])
@pytest.mark.parametrize(("dim", "tokens"), [(64, 1), (128, 3), (80, 2)])
def test_a_rotation_has_the_bits_of_its_form(
    dtype: torch.dtype, form: Rotation, by_pair: bool, dim: int, tokens: int
) -> None:
    """Queries and keys lie in one tensor, as after one product for both."""
    both = random(1, tokens, 4, dim, dtype=dtype)
    q, k = both[:, :, :3].transpose(1, 2), both[:, :, 3:].transpose(1, 2)
    tables = dtype if form is Rotation.ROUNDED_PRODUCTS else torch.float32
    cos, sin = (random(1, tokens, dim // 2 if by_pair else dim, dtype=tables, seed=seed) for seed in (2, 3))
    assert launch.layout_of(q, k, cos, sin) == Layout(dtype, tables, by_pair)
    for found, x in zip(launch.rotate(q, k, cos, sin, form), (q, k), strict=True):
        assert torch.equal(found, form.computed(x, cos, sin, by_pair))
        assert found.transpose(1, 2).is_contiguous()


@every_dtype
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("width", [96, 1500])
def test_a_gated_product_rounds_as_its_form(dtype: torch.dtype, activation: Activation, width: int) -> None:
    gate, up = random(1, 3, width, dtype=dtype) * 3, random(1, 3, width, dtype=dtype, seed=1)
    tail = {} if activation is Activation.SILU else {"share": 0.9, "atol": 1e-5}  # there torch cancels digits
    equals(launch.gated(gate, up, activation), activation.computed(gate) * up, **tail)


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_gated_product_of_a_joined_one(tokens: int) -> None:
    gate, up = random(1, tokens, 2 * 96, dtype=torch.bfloat16).split(96, -1)
    found = launch.gated(gate, up, Activation.SILU)
    assert found is not None
    equals(found, Activation.SILU.computed(gate) * up)
    assert found.is_contiguous()
    apart = random(2, 6, 96, dtype=torch.bfloat16)[:, :2]
    assert launch.gated(apart, apart, Activation.SILU) is None, "rows at several distances"


def test_far_gates_do_not_overflow() -> None:
    gate = torch.tensor([[-3e4, -200.0, -0.0, 0.0, 200.0, 3e4]], device=DEVICE)
    for activation in Activation:
        equals(launch.gated(gate, torch.ones_like(gate), activation), activation.computed(gate))


def test_tensors_that_do_not_fit_are_refused() -> None:
    x = random(1, 4, 8, dtype=torch.float32)
    weight = random(8, dtype=torch.float32)
    assert launch.rms_norm(x.double(), weight.double(), 1e-6, Norm.ONE_MORE) is None
    assert launch.rms_norm(x.half(), weight, 1e-6, Norm.ONE_MORE) is None
    gaps = random(2, 3, 4, 5, 8, dtype=torch.float32)[:, :, :2, :3]
    assert launch.rms_norm(gaps, weight, 1e-6, Norm.ONE_MORE) is None, "rows by four indices"
    assert launch.rms_norm(x[:, :0], weight, 1e-6, Norm.ONE_MORE) is None
    assert launch.added_norm(x, x[:, :1], weight, 1e-6, Norm.ONE_MORE) is None
    assert launch.added_norm(x.mT.contiguous().mT, x, weight, 1e-6, Norm.ONE_MORE) is None
    assert launch.gated(x, x[:, :1], Activation.SILU) is None
    assert launch.gated(x.mT, x.mT, Activation.SILU) is None
    q, table = x[None], random(1, 4, 8, dtype=torch.float32)
    assert launch.layout_of(q, q, table, table) == Layout(torch.float32, torch.float32, False)
    for others in ((q[0], q, table, table), (q, q, table[..., :2], table[..., :2]), (q, q, table[0], table[0])):
        assert launch.layout_of(*others) is None
    assert launch.layout_of(q.expand(2, -1, -1, -1), q, table, table) is None, "several rows"
