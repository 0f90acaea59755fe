"""Packed weights: the layers' numbers, the served model, every refusal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import nn

from service.cli.server import local_server
from service.models.fingerprint import contents, fingerprint
from service.models.linear import packing, timing
from service.models.linear.packing import (
    LAYOUTS,
    NotPacked,
    PackedLinear,
    by_packed_mkl,
    by_packed_onednn,
    has_mkl,
    pack,
    packed_bytes,
)
from service.models.linear.products import Product, has_onednn, plain
from service.models.loading import DEMO, ModelLoadError, load, packed
from service.models.quantization import Quantization
from service.settings import Settings
from tests.models import tiny_model, tiny_tokens

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")

ENCODINGS = ("default", "yarn:4", "self_extend:neighbor_window=64", "streaming")


def settings(**fields: Any) -> Settings:
    return Settings(_env_file=None, device="cpu", cache_tokens=2048, **fields)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Layers multiply by their plain weights while gradients are on."""
    with torch.no_grad():
        yield


@pytest.fixture(params=LAYOUTS, ids=lambda product: product.__name__)
def product(request: pytest.FixtureRequest) -> Product:
    if request.param is by_packed_mkl and not has_mkl():
        pytest.skip("this torch has no MKL")
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 64), (17, 64), (2, 300, 64), (0, 64), (2, 0, 64)], ids=str)
def test_a_layer_gives_the_products_of_its_weight(product: Product, shape: tuple[int, ...], bias: bool) -> None:
    linear, x = nn.Linear(64, 48, bias=bias).requires_grad_(False), torch.randn(shape)
    torch.testing.assert_close(PackedLinear(linear, product)(x), linear(x), rtol=0, atol=2e-6)


@pytest.mark.parametrize("shape", [(1000, 1003), (61, 2050), (2048, 96)], ids=str)
def test_a_layout_is_for_any_number_of_rows(product: Product, shape: tuple[int, int]) -> None:
    """The packed copy alone is read: the plain weight is another by now."""
    out_features, in_features = shape
    linear = nn.Linear(in_features, out_features, bias=False).requires_grad_(False)
    weight = linear.weight.double()
    packed = PackedLinear(linear, product)
    linear.weight.zero_()
    for rows in (1, 2, 3, 15, 16, 17, 63, 64, 65, 257, 600):
        x = torch.randn(rows, in_features)
        torch.testing.assert_close(packed(x).double(), x.double() @ weight.T, rtol=0, atol=1e-5)


@pytest.mark.parametrize("fast", LAYOUTS, ids=lambda product: product.__name__)
def test_the_processor_decides_on_a_layout(fast: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_mkl():
        pytest.skip("this torch has no MKL")

    def slow(linear: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return plain(linear, x)

    layouts = {slow if product is not fast else product: layout for product, layout in LAYOUTS.items()}
    monkeypatch.setattr(packing, "LAYOUTS", layouts)
    assert packing._product([nn.Linear(64, 64).requires_grad_(False)]) is fast


def test_a_first_layer_larger_than_what_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "BYTES", 1 << 16)
    linear, x = nn.Linear(256, 192, bias=False).requires_grad_(False), torch.randn(9, 256)
    model, expected = nn.Sequential(linear), linear(x)
    monkeypatch.setattr(packing, "some", partial(timing.some, size=timing.BYTES))
    pack(model)
    assert isinstance(model[0], PackedLinear)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 17, 300])
def test_half_precision_is_packed_where_the_processor_has_it(rows: int, dtype: torch.dtype) -> None:
    if not has_onednn(dtype):
        pytest.skip(f"this processor has no products of {dtype}")
    linear, x = nn.Linear(512, 192, bias=False).requires_grad_(False).to(dtype), torch.randn(rows, 512).to(dtype)
    model = nn.Sequential(linear)
    expected = linear.double()(x.double())
    pack(model.to(dtype))
    found = model(x)
    assert found.dtype == dtype
    error = (found.double() - expected).abs().max()
    assert error < 4 * torch.finfo(dtype).eps * expected.abs().max()
    assert isinstance(model[0], PackedLinear)
    assert model[0].choice[-1][1] is by_packed_onednn


def test_inputs_need_not_be_contiguous(product: Product) -> None:
    linear = nn.Linear(64, 48).requires_grad_(False)
    for x in (torch.randn(5, 128)[:, ::2], torch.randn(64, 7).T, torch.randn(3, 64)[:1].expand(4, 64)):
        torch.testing.assert_close(PackedLinear(linear, product)(x), linear(x), rtol=0, atol=2e-6)


def test_parameters_stay_the_models_own() -> None:
    _, model = tiny_model("llama", tie_word_embeddings=True)
    before, ids = dict(model.named_parameters()), tiny_tokens(2, 40)
    with torch.no_grad():
        logits = model(ids).logits
        pack(model)
        assert (model(ids).logits - logits).abs().max() < 1e-5
    assert {name: id(each) for name, each in model.named_parameters()} == {
        name: id(each) for name, each in before.items()
    }
    assert model.lm_head.weight is model.model.embed_tokens.weight
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert {type(module) for module in linear} == {PackedLinear}
    assert packed_bytes(model) == sum(4 * module.weight.numel() for module in linear)


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[str, str]]:
    """Base URLs of the demo model without and with packed weights."""
    of_demo: dict[str, Any] = {"model": str(DEMO / "ropeway-demo")}
    with (
        local_server(settings(**of_demo)) as plain,
        local_server(settings(**of_demo, packed_weights=True)) as packed_url,
    ):
        yield plain, packed_url


def test_tokens_and_scores_are_those_of_plain_weights(servers: tuple[str, str]) -> None:
    body: dict[str, Any] = {"prompt": list(range(5, 300)), "max_new_tokens": 12, "pe": ENCODINGS}
    plain, found = (httpx.post(f"{url}/generate", json=body, timeout=60).json()["results"] for url in servers)
    assert [result["token_ids"] for result in found] == [result["token_ids"] for result in plain]
    scored = {"input": list(range(3, 600)), "lengths": [256, 500], "methods": ENCODINGS}
    plain, found = (httpx.post(f"{url}/perplexity", json=scored, timeout=60).json()["methods"] for url in servers)
    for one, other in zip(plain, found, strict=True):
        for expected, at in zip(one["lengths"], other["lengths"], strict=True):
            assert at["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-5)


def test_the_listing_says_so(servers: tuple[str, str]) -> None:
    plain, found = (httpx.get(f"{url}/models").json()["models"][0] for url in servers)
    assert (plain["packed_weights"], found["packed_weights"]) == (False, True)
    assert found["memory"]["weights"] > 1.5 * plain["memory"]["weights"]


def test_a_packed_model_is_the_same_model_with_other_rounding() -> None:
    (_, plain), (_, other) = (tiny_model("llama") for _ in range(2))
    assert fingerprint(plain) == fingerprint(other)
    pack(other)
    assert contents(plain) == contents(other)
    assert fingerprint(plain) != fingerprint(other)


def test_what_cannot_be_packed_is_refused(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = settings(dtype="bfloat16", packed_weights=True)
    with monkeypatch.context() as older:
        older.setattr(packing, "has_onednn", lambda dtype: dtype == torch.float32)
        refusal = r"ROPEWAY_PACKED_WEIGHTS: model 'tiny': this CPU packs float32, not torch.bfloat16 on cpu"
        with pytest.raises(ModelLoadError, match=refusal):
            packed(load("tiny", checkpoints / "tiny", wanted), wanted)
    quantized = replace(load("tiny", checkpoints / "tiny", settings()), quantization=Quantization("int8", {"int8": 28}))
    with pytest.raises(ModelLoadError, match=r"ROPEWAY_PACKED_WEIGHTS: model 'tiny': its weights are quantized"):
        packed(quantized, wanted)
    with pytest.raises(NotPacked, match="no plain linear layer"):
        pack(nn.Sequential(nn.Embedding(4, 4)))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(NotPacked, match="no oneDNN"):
        pack(nn.Linear(4, 4))


def test_a_layer_with_two_names_is_packed_under_both() -> None:
    shared = nn.Linear(64, 48).requires_grad_(False)
    model = nn.ModuleDict({"one": shared, "two": shared, "other": nn.Linear(48, 64).requires_grad_(False)})
    pack(model)
    assert type(model["one"]) is PackedLinear
    assert model["one"] is model["two"]
