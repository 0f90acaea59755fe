"""Products by groups: the layers' numbers, which layers have groups, the served model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from torch import nn

from service.cli.server import local_server
from service.models import grouping, packing, products, start
from service.models.fingerprint import fingerprint
from service.models.grouping import FEW, MOST, GroupedLinear, by_groups, group, has_groups, most_rows, plain
from service.models.loading import DEMO
from service.models.packing import pack, products_of
from service.settings import Settings
from tests.models import tiny_model, tiny_tokens

pytestmark = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")


def layer(bias: bool = False, **options: Any) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(512, 192, bias=bias, **options).requires_grad_(False)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 512), (2, 512), (1, 2, 512), (2, 31, 512), (0, 512), (2, 0, 512)], ids=str)
def test_a_layer_gives_the_products_of_its_weight(shape: tuple[int, ...], bias: bool) -> None:
    linear, x = layer(bias), torch.randn(shape)
    expected = linear(x)
    close(GroupedLinear(linear, MOST)(x), expected)
    if x.numel():
        close(by_groups(linear, x), expected)


@pytest.mark.parametrize("rows", [1, FEW, 17])
def test_products_in_bfloat16(rows: int) -> None:
    linear, x = layer(dtype=torch.bfloat16), torch.randn(rows, 512).bfloat16()
    found, expected = by_groups(linear, x), x.double() @ linear.weight.double().T
    assert found.dtype == torch.bfloat16
    assert (found - expected).abs().max() < 4 * torch.finfo(torch.bfloat16).eps * expected.abs().max()


def test_inputs_need_not_be_contiguous() -> None:
    linear = layer()
    for x in (torch.randn(1, 1024)[:, ::2], torch.randn(512, 7).T, torch.randn(3, 512)[:1].expand(4, 512)):
        close(by_groups(linear, x), linear(x))
        assert by_groups(linear, x).is_contiguous()


@pytest.mark.parametrize(("most", "rows"), [(FEW, {1, 2}), (MOST, {1, 2, 3, MOST})])
def test_few_rows_go_by_groups(most: int, rows: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def counted(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return by_groups(linear, x)

    monkeypatch.setattr(grouping, "by_groups", counted)
    linear = GroupedLinear(layer(), most)
    for count in (0, 1, FEW, 3, MOST, MOST + 1):
        linear(torch.randn(count, 512))
    assert set(seen) == rows


@pytest.mark.parametrize(
    ("faster", "threads", "most"),
    [(set(), 2, 0), ({16}, 2, 0), ({1}, 1, FEW), ({1}, 2, FEW), ({1, 16}, 1, FEW), ({1, 16}, 2, MOST)],
)
def test_the_processor_decides(faster: set[int], threads: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(linears: list[nn.Linear], rows: int, *products: Any) -> Any:
        assert linears
        return by_groups if rows in faster and by_groups in products else products[0]

    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(grouping, "fastest", timed)
    monkeypatch.setattr(packing, "fastest", timed)
    assert most_rows(nn.Sequential(layer())) == most
    assert most_rows(nn.Sequential(nn.Linear(64, 64))) == 0, "it has no groups"
    model = nn.Sequential(layer(), nn.Linear(64, 64))
    pack(model)
    many = model[0].many
    assert [linear.few for linear in model] == [by_groups if 1 in faster else many, many]
    assert products_of(model) == sorted({"packed", many.__name__, *(["by_groups"] if 1 in faster else [])})


@pytest.mark.parametrize(("costs", "chosen"), [((20, 19), 0), ((10, 8), 1), ((7, 10), 0), ((10, 7, 6), 2)])
def test_the_fastest_product(costs: tuple[int, ...], chosen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0]
    monkeypatch.setattr(products, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    multiplied: list[int] = []

    def product(cost: int) -> Any:
        def multiply(linear: nn.Linear, input: torch.Tensor) -> torch.Tensor:
            assert input.shape == (3, 512)
            multiplied.append(cost)
            clock[0] += cost + (100 if len(multiplied) == 1 else 0)  # the first run is slow
            return plain(linear, input)

        return multiply

    given = [product(cost) for cost in costs]
    assert products.fastest([layer(), layer()], 3, *given) is given[chosen]
    assert set(multiplied) == set(costs)


def test_weights_of_a_few_layers_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "BYTES", 2 * layer().weight.nbytes)
    seen: list[nn.Linear] = []

    def product(linear: nn.Linear, input: torch.Tensor) -> torch.Tensor:
        seen.append(linear)
        return plain(linear, input)

    linears = [layer() for _ in range(3)]
    products.fastest(linears, 1, product)
    assert set(seen) == set(linears[:2])
    monkeypatch.setattr(products, "BYTES", 1)
    seen.clear()
    products.fastest(linears, 1, product)
    assert set(seen) == set(linears[:1])


def test_layers_with_groups() -> None:
    assert has_groups(layer())
    assert not has_groups(nn.Linear(512, 200)), "200 rows are no groups of 64"
    assert not has_groups(nn.Linear(64, 64)), "the calls take longer than the product"
    assert has_groups(layer(dtype=torch.bfloat16))
    assert not has_groups(layer(dtype=torch.float16))
    assert not has_groups(layer(device="meta"))


def test_a_model_keeps_its_parameters() -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 640}
    _, model = tiny_model("llama", tie_word_embeddings=True, **sizes)
    before, ids = dict(model.named_parameters()), tiny_tokens(2, 40)
    contents = fingerprint(model)
    with torch.no_grad():
        logits, one = model(ids).logits, model(ids[:1, :1]).logits
        group(model, MOST)
        close(model(ids).logits, logits)
        close(model(ids[:1, :1]).logits, one)
    after = dict(model.named_parameters())
    assert {name: id(each) for name, each in after.items()} == {name: id(each) for name, each in before.items()}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert isinstance(model.lm_head, GroupedLinear)
    assert fingerprint(model) != contents, "outcomes of plain products are not its own"


def test_the_demo_model_is_served_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stream decodes one row per step; its tokens are those of four streams, whose products are plain."""
    monkeypatch.setattr(start, "most_rows", lambda model: FEW)
    settings = Settings(_env_file=None, device="cpu", cache_tokens=2048, model=str(DEMO / "ropeway-demo"))
    prompt = list(range(5, 60))
    with local_server(settings) as url:
        alone, among = (
            httpx.post(f"{url}/generate", json={"prompt": prompts, "max_new_tokens": 24}, timeout=60).json()
            for prompts in (prompt, [prompt, *(list(range(n, n + 30)) for n in (7, 90, 200))])
        )
    assert alone["results"][0]["token_ids"] == among["results"][0]["token_ids"]
