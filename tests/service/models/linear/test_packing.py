"""Packed weights: their numbers and products, the models that have them, and adapters over them."""

from __future__ import annotations

import copy
import gc
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from service.cli.server import local_server
from service.models import start
from service.models.checkpoint import loading
from service.models.checkpoint.adapters import Adapter, adapted
from service.models.checkpoint.fingerprint import contents
from service.models.checkpoint.loading import DEMO, load
from service.models.linear import layers, packing
from service.models.linear.layers import UNBOUNDED, ChosenLinear, replace, use_fastest
from service.models.linear.packing import PackedWeight, by_packed, by_sums, has_packed_weights, pack, width_of
from service.models.linear.products import Product, has_onednn, products_by
from service.models.memory.weights import parts, places
from service.settings import Settings
from tests.models import tiny_model, tiny_tokens
from tests.service.conftest import tiny_checkpoint

pytestmark = [
    pytest.mark.skipif(not has_onednn(torch.float32), reason="this torch has no oneDNN"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]

ENCODINGS = ("default", "yarn:4", "self_extend:neighbor_window=64", "streaming")
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 640}
UNTIED = SIZES | {"tie_word_embeddings": False}


def layer(out_features: int = 192, bias: bool = False, dtype: torch.dtype = torch.float32) -> nn.Linear:
    if not has_onednn(dtype):
        pytest.skip(f"this processor has no products of {dtype}")
    torch.manual_seed(0)
    return nn.Linear(512, out_features, bias=bias, dtype=dtype).requires_grad_(False)


def packed(linear: nn.Linear, product: Product = by_packed) -> ChosenLinear:
    """A layer with the packed weight of ``linear``, which is empty then."""
    weight = pack(linear.weight.detach())
    assert weight is not None
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return ChosenLinear(linear, ((1, product), (UNBOUNDED, by_packed)))


def pack_all(model: nn.Module) -> None:
    """``use_fastest``, as if packed weights were the fastest everywhere."""
    shared = layers._shared(model)
    linears = [linear for linear in layers.ordinary(model) if len(products_by(linear)) > 1]
    replace(model, {each: packed(each, by_sums) for each in linears if each.weight.data_ptr() not in shared})


def skip_an_unknown_half(weight: torch.Tensor) -> None:
    """Processors with products of float16 have another layout for it. Such weights stay plain."""
    if weight.dtype == torch.float16 and width_of(weight) is None:
        pytest.skip("oneDNN has a layout of float16 here that is unknown")


class TestWeight:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("out_features", [64, 192, 1000])
    def test_its_numbers_are_those_of_the_plain_one(self, out_features: int, dtype: torch.dtype) -> None:
        weight = layer(out_features, dtype=dtype).weight.detach()
        skip_an_unknown_half(weight)
        weight[0, :4] = torch.tensor([torch.inf, -0.0, 1e-40, torch.nan])
        found = pack(weight)
        assert found is not None
        assert (found.shape, found.dtype, found.device) == (weight.shape, dtype, weight.device)
        integers = torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.equal(found.plain().view(integers), weight.view(integers))
        assert torch.equal(found[3:7], weight[3:7])
        assert type(found.t()) is torch.Tensor

    @pytest.mark.parametrize("shape", [(100, 512), (192, 500)])
    def test_a_layout_with_many_zeros_is_none(self, shape: tuple[int, int]) -> None:
        assert pack(torch.randn(shape)) is None

    @pytest.mark.parametrize(("of_probe", "order"), [(True, (0, 2, 1, 3, 4, 5)), (False, (5, 1, 2, 3, 4, 0))])
    def test_an_unknown_layout_is_none(
        self, of_probe: bool, order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A probe, whose numbers all differ, is compared whole. Three blocks of each weight are too."""
        weight = layer(384).weight.detach()
        packing._width.cache_clear()
        if not of_probe:
            assert pack(weight) is not None
        reorder = torch.ops.mkldnn._reorder_linear_weight

        def in_another_order(given: torch.Tensor, rows: int) -> torch.Tensor:
            return reorder(given.view(6, 64, -1)[list(order)].flatten(0, 1), rows)  # type: ignore[no-any-return]

        monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", in_another_order)
        assert pack(weight) is None
        packing._width.cache_clear()

    @pytest.mark.parametrize("shape", [(63, 515), (64, 511)])
    def test_inputs_that_make_no_pairs_are_none(self, shape: tuple[int, int]) -> None:
        if has_onednn(torch.bfloat16):
            assert pack(torch.zeros(shape, dtype=torch.bfloat16)) is None

    def test_a_processor_without_such_products_packs_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        weight = layer().weight.detach()
        monkeypatch.setattr(packing, "has_onednn", lambda dtype: False)
        monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", pytest.fail)
        assert pack(weight) is None

    def test_a_vocabulary_is_found_by_a_part_of_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(packing, "PROBED", 128)
        packing._width.cache_clear()
        weight = layer(1000).weight.detach()
        assert torch.equal(pack(weight).plain(), weight)  # type: ignore[union-attr]
        assert packing._width.cache_info().currsize == 1

    def test_nobody_writes_into_it(self) -> None:
        linear = packed(layer())
        for write in (lambda: linear.weight.mul_(2), lambda: nn.init.zeros_(linear.weight)):
            with pytest.raises(TypeError, match="a weight in this layout is fixed"):
                write()
        with pytest.raises(TypeError, match="a weight in this layout is fixed"):
            linear.weight.data = torch.zeros(192, 512)

    def test_copies_share_its_memory(self) -> None:
        linear = packed(layer())
        again = nn.Parameter(linear.weight.detach(), requires_grad=False)
        copied = copy.deepcopy(linear)
        assert again.blocks.data_ptr() == copied.weight.blocks.data_ptr() == linear.weight.blocks.data_ptr()
        x = torch.randn(3, 512)
        with torch.no_grad():
            assert torch.equal(copied(x), linear(x))

    def test_a_view_of_its_memory_keeps_it(self) -> None:
        weight = layer(1024).weight.detach()
        blocks = pack(weight).blocks  # type: ignore[union-attr]
        gc.collect()
        others = [pack(torch.zeros_like(weight)) for _ in range(4)]
        assert len(others) == 4
        assert torch.equal(blocks.permute(0, 2, 1, 3).reshape(1024, 512), weight)


class TestProducts:
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("out_features", [192, 1000])
    @pytest.mark.parametrize("rows", [1, 2, 3, 15, 16, 17, 64, 257, 600])
    def test_every_number_of_rows(self, rows: int, out_features: int, bias: bool) -> None:
        linear, x = layer(out_features, bias), torch.randn(rows, 512)
        expected = copy.deepcopy(linear).double()(x.double())
        with torch.no_grad():
            found = packed(linear, by_sums)(x).double()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)

    @pytest.mark.parametrize("shape", [(0, 512), (2, 0, 512), (1, 1, 512), (512,), (2, 300, 512)], ids=str)
    def test_every_shape(self, shape: tuple[int, ...]) -> None:
        x = torch.randn(shape)
        with torch.no_grad():
            torch.testing.assert_close(packed(layer(), by_sums)(x), layer()(x), rtol=0, atol=3e-6)

    def test_inputs_need_not_be_contiguous(self) -> None:
        several = torch.randn(5, 1024)
        with torch.no_grad():
            for x in (
                several[:, ::2],
                several[:1, ::2],
                several.view(1024, 5).T[:, :512],
                several[:1, :512].expand(4, 512),
            ):
                torch.testing.assert_close(packed(layer(), by_sums)(x), layer()(x), rtol=0, atol=3e-6)

    def test_a_sum_is_as_exact_as_other_products(self) -> None:
        """Over 8,192 inputs, the error is a few times that of a blocked product at most."""
        torch.manual_seed(1)
        linear, x = nn.Linear(8192, 256, bias=False).requires_grad_(False), torch.randn(1, 8192)
        expected = x.double() @ linear.weight.double().T
        ordinary = (linear(x).double() - expected).abs().max()
        with torch.no_grad():
            error = (packed(linear, by_sums)(x).double() - expected).abs().max()
        assert error < 8 * ordinary
        assert error < 1e-5

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("rows", [1, 17, 300])
    def test_half_precision(self, rows: int, dtype: torch.dtype) -> None:
        linear, x = layer(dtype=dtype), torch.randn(rows, 512).to(dtype)
        skip_an_unknown_half(linear.weight.detach())
        with torch.no_grad():
            found = packed(linear)(x)
        expected = layer(dtype=dtype).double()(x.double())
        assert found.dtype == dtype
        assert (found.double() - expected).abs().max() < 4 * torch.finfo(dtype).eps * expected.abs().max()

    def test_gradients_of_inputs_are_those_of_the_plain_layer(self) -> None:
        x = torch.randn(3, 512, requires_grad=True)
        expected = torch.autograd.grad(layer()(x).square().sum(), x)[0]
        assert torch.equal(torch.autograd.grad(packed(layer())(x).square().sum(), x)[0], expected)


class TestModel:
    def test_it_has_the_memory_contents_and_logits_of_before(self) -> None:
        (_, plain), (_, other) = (tiny_model("llama", tie_word_embeddings=True, **SIZES) for _ in range(2))
        pack_all(other)
        assert has_packed_weights(other)
        assert not has_packed_weights(plain)
        assert other.lm_head.weight is other.model.embed_tokens.weight
        assert type(other.lm_head) is nn.Linear
        assert contents(plain) == contents(other)
        assert sum(places(plain).values()) == sum(places(other).values())
        assert {name: each.shape for name, each in plain.named_parameters()} == {
            name: each.shape for name, each in other.named_parameters()
        }
        ids = tiny_tokens(2, 40)
        with torch.no_grad():
            for given in (ids, ids[:1, :1]):
                torch.testing.assert_close(other(given).logits, plain(given).logits, rtol=0, atol=1e-5)

    def test_files_are_packed_as_they_are_loaded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """No plain copy is left of a weight that is packed; quantization has them plain."""
        folder = tiny_checkpoint(tmp_path / "tiny", **SIZES)
        monkeypatch.setattr(loading, "use_fastest", pack_all)
        settings = Settings(_env_file=None, device="cpu")
        model = load("tiny", folder, settings).model
        found = {name for name, weight in model.named_parameters() if isinstance(weight, PackedWeight)}
        assert {name.split(".")[-2] for name in found} == {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert contents(model) == contents(reference.eval())
        assert not has_packed_weights(load("tiny", folder, settings.model_copy(update={"quantization": "int8"})).model)


class TestAdapter:
    @pytest.fixture(params=["none", "all"])
    def folders(self, tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, Path]:
        """A base, and an adapter of the first layer's queries and outputs, perhaps with all biases."""
        base = tiny_checkpoint(tmp_path / "tiny", **UNTIED, initializer_range=0.05, attention_bias=True)
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], layers_to_transform=[0], bias=request.param)
        wrapped = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
        with torch.no_grad():
            for weight in wrapped.parameters():
                if weight.requires_grad:
                    weight.add_(torch.randn_like(weight) * 0.2)
        wrapped.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
        return base, tmp_path / "adapter"

    def test_it_shares_what_it_does_not_change(
        self, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        base, folder = folders
        monkeypatch.setattr(loading, "use_fastest", pack_all)
        checkpoint = load("tiny", base, Settings(_env_file=None, device="cpu"))
        before = contents(checkpoint.model)
        model = adapted(checkpoint, Adapter("other", folder)).model
        names = {name for name, module in model.named_modules() if type(module) is nn.Linear}
        assert {"model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"} <= names
        pack_all(model)
        shared = places(checkpoint.model)
        weights = {name: each.detach() for name, each in model.named_parameters() if name.endswith(".weight")}
        own = {name for name, weight in weights.items() if parts(weight)[0].data_ptr() not in shared}
        assert own == {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"}
        assert contents(checkpoint.model) == before
        oracle: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder)
        ids = tiny_tokens(1, 30)
        with torch.no_grad():
            expected = oracle.merge_and_unload()(ids).logits
            torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-5)
            assert (checkpoint.model(ids).logits - expected).abs().max() > 1e-3

    @pytest.mark.parametrize("folders", ["none"], indirect=True)
    def test_a_quantized_base_shares_its_output_layer(
        self, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Quantization leaves it as it was. Two packed copies would take twice its memory."""
        pytest.importorskip("torchao")
        monkeypatch.setattr(start, "use_fastest", pack_all)
        base, folder = folders
        settings = Settings(_env_file=None, device="cpu", quantization="int8", model=str(base))
        settings = settings.model_copy(update={"adapters": {"other": folder}})
        with ExitStack() as stack:
            found = [stack.enter_context(each) for each in next(start.started(settings))]
            heads = [each.checkpoint.model.get_output_embeddings().weight for each in found]
            assert len({parts(head.detach())[0].data_ptr() for head in heads}) == 1


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[str, str]]:
    """Base URLs of the demo model with the weights of its file, and with packed ones."""
    settings = Settings(_env_file=None, device="cpu", cache_tokens=2048, model=str(DEMO / "ropeway-demo"))
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(start, "use_fastest", lambda model: None)
        patches.setattr(loading, "use_fastest", lambda model: None)
        with local_server(settings) as plain:
            patches.setattr(loading, "use_fastest", pack_all)
            with local_server(settings) as other:
                yield plain, other


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
    assert plain["parameters"] == found["parameters"]
    assert found["memory"]["weights"] == plain["memory"]["weights"]
    assert "192x448: by_sums up to 1, by_packed" in found["products"]
    assert json.dumps(plain["products"]) == "[]"


def test_the_fastest_is_what_a_model_gets() -> None:
    """Without anything pretended: weights are packed or plain, and the model computes the same."""
    _, model = tiny_model("llama", **SIZES)
    ids = tiny_tokens(2, 40)
    with torch.no_grad():
        before = model(ids).logits
        use_fastest(model)
        torch.testing.assert_close(model(ids).logits, before, rtol=0, atol=1e-5)
