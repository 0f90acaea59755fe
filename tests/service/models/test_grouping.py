"""Products by groups: the layers' numbers, which layers have groups, the served model."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import torch
from torch import nn

from service.cli.server import local_server
from service.models import grouping
from service.models.fingerprint import fingerprint
from service.models.grouping import FEW, MOST, GroupedLinear, by_groups, group, has_groups
from service.models.loading import DEMO
from service.models.packing import PackedLinear
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
    close(GroupedLinear(linear)(x), expected)
    if rows := x.numel() // 512:
        close(by_groups(linear, x, rows), expected)


def test_inputs_need_not_be_contiguous() -> None:
    linear = layer()
    for x in (torch.randn(1, 1024)[:, ::2], torch.randn(512, 7).T, torch.randn(3, 512)[:1].expand(4, 512)):
        close(by_groups(linear, x, len(x)), linear(x))
        assert by_groups(linear, x, len(x)).is_contiguous()


@pytest.mark.parametrize(("threads", "rows"), [(1, {1, 2}), (2, {1, 2, 3, MOST})])
def test_few_rows_go_by_groups(threads: int, rows: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    seen: list[int] = []

    def counted(linear: nn.Linear, x: torch.Tensor, count: int) -> torch.Tensor:
        seen.append(count)
        return by_groups(linear, x, count)

    monkeypatch.setattr(grouping, "by_groups", counted)
    linear = GroupedLinear(layer())
    for count in (0, 1, FEW, 3, MOST, MOST + 1):
        linear(torch.randn(count, 512))
    assert set(seen) == rows


def test_layers_with_groups() -> None:
    assert has_groups(layer())
    assert not has_groups(nn.Linear(512, 200)), "200 rows are no groups of 64"
    assert not has_groups(nn.Linear(64, 64)), "the calls take longer than the product"
    assert not has_groups(layer(dtype=torch.bfloat16))
    assert not has_groups(layer(device="meta"))
    assert PackedLinear(layer()).few == FEW
    assert PackedLinear(nn.Linear(64, 48).requires_grad_(False)).few == 0


def test_a_model_keeps_its_parameters() -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 640}
    _, model = tiny_model("llama", tie_word_embeddings=True, **sizes)
    before, ids = dict(model.named_parameters()), tiny_tokens(2, 40)
    contents = fingerprint(model)
    with torch.no_grad():
        logits, one = model(ids).logits, model(ids[:1, :1]).logits
        group(model)
        close(model(ids).logits, logits)
        close(model(ids[:1, :1]).logits, one)
    after = dict(model.named_parameters())
    assert {name: id(each) for name, each in after.items()} == {name: id(each) for name, each in before.items()}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert isinstance(model.lm_head, GroupedLinear)
    assert fingerprint(model) != contents, "outcomes of plain products are not its own"


def test_the_demo_model_is_served_with_it() -> None:
    """One stream decodes one row per step; its tokens are those of four streams, whose products are plain."""
    settings = Settings(_env_file=None, device="cpu", cache_tokens=2048, model=str(DEMO / "ropeway-demo"))
    prompt = list(range(5, 60))
    with local_server(settings) as url:
        alone, among = (
            httpx.post(f"{url}/generate", json={"prompt": prompts, "max_new_tokens": 24}, timeout=60).json()
            for prompts in (prompt, [prompt, *(list(range(n, n + 30)) for n in (7, 90, 200))])
        )
    assert alone["results"][0]["token_ids"] == among["results"][0]["token_ids"]
