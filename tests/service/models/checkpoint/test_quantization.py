"""Quantized weights: the rounding of each format, the served model, every refusal. Most tests skip without torchao."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from service.cli.server import local_server
from service.models.checkpoint.fingerprint import contents
from service.models.checkpoint.loading import DEMO, load, quantized
from service.models.checkpoint.quantization import NotQuantized, Scheme, _int4, format_of, quantize
from service.models.memory.weights import places
from service.models.registry import ModelRegistry
from service.settings import Settings
from tests.field.configurations import tiny_model as of_type
from tests.models import tiny_model
from tests.service.cli.shell import ropeway
from tests.service.conftest import tiny_checkpoint

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # peft 0.21
]
CPU = torch.device("cpu")
SCHEMES: tuple[Scheme, ...] = ("int8", "int4")


def settings(**fields: Any) -> Settings:
    return Settings(_env_file=None, device="cpu", dtype="float32", cache_tokens=2048, **fields)


@pytest.mark.parametrize(
    ("rows", "columns", "scheme", "expected"),
    [
        (256, 256, "int4", ("int4", 128)),
        (128, 192, "int4", ("int4", 64)),
        (16, 96, "int4", ("int4", 32)),
        (16, 172, "int4", ("int8", 0)),  # no group divides it
        (172, 64, "int4", ("int8", 0)),  # no kernel for so many rows
        (172, 64, "int8", ("int8", 0)),
    ],
)
def test_a_layer_takes_the_widest_group_that_fits(
    rows: int, columns: int, scheme: Scheme, expected: tuple[Scheme, int]
) -> None:
    assert format_of(nn.Linear(columns, rows), scheme) == expected


@needs_torchao
class TestRounding:
    @pytest.mark.parametrize("scheme", SCHEMES)
    @torch.no_grad()
    def test_every_weight_is_within_half_a_step(self, scheme: Scheme) -> None:
        before = tiny_model("llama")[1]
        after = tiny_model("llama")[1]
        assert quantize(after, scheme, CPU).layers == {scheme: 14}
        for (name, old), new in zip(before.named_modules(), after.modules(), strict=True):
            if not isinstance(old, nn.Linear) or name == "lm_head":
                continue
            found = new(torch.eye(old.in_features)).T  # the weights, through the kernel
            groups = old.weight.unflatten(1, (-1, 32 if old.in_features == 96 else 64))  # hidden 64, intermediate 96
            if scheme == "int4":
                step = (groups.amax(-1) - groups.amin(-1)) / 15
                allowed = step[..., None].expand_as(groups).flatten(1) * 0.5
            else:
                allowed = old.weight.abs().amax(1, keepdim=True) / 127 * 0.5
            error = (found - old.weight).abs()
            assert bool((error <= 1.02 * allowed + 1e-6).all()), name
            assert float(error.max()) > 0.1 * float(allowed.max()), "it rounds"

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_embedding_output_and_relative_vectors_stay(self, scheme: Scheme) -> None:
        model = load("demo", DEMO / "ropeway-demo", settings(quantization=scheme)).model
        weights = {name: parameter.clone() for name, parameter in model.named_parameters() if "proj" not in name}
        found = quantize(model, scheme, CPU)
        assert found.layers == {scheme: 28}
        after = dict(model.named_parameters())
        assert all(torch.equal(after[name], weight) for name, weight in weights.items())
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight

    @torch.no_grad()
    def test_grouped_projections_stay(self) -> None:
        """DeepSeek-V4 reads the weights of its grouped projections by parts, which torchao cannot."""
        model = of_type("deepseek_v4")
        grouped = {name: weight.clone() for name, weight in model.named_parameters() if "o_a_proj" in name}
        before = model(torch.arange(3, 19)[None], use_cache=False).logits
        quantize(model, "int8", CPU)
        difference = model(torch.arange(3, 19)[None], use_cache=False).logits - before
        # Some tokens take other experts, so the median is compared.
        assert 0.0 < float(difference.abs().median()) < 0.1 * float(before.abs().median())
        assert grouped
        assert all(torch.equal(weight, model.get_parameter(name)) for name, weight in grouped.items())

    def test_memory_falls_and_the_contents_differ(self) -> None:
        seen, sizes = {}, {}
        for scheme in (None, *SCHEMES):
            given = settings(quantization=scheme)
            models = [quantized(load("demo", DEMO / "ropeway-demo", given), given).model for _ in range(2)]
            assert contents(models[0]) == contents(models[1])
            seen[contents(models[0])], sizes[scheme] = scheme, sum(places(models[0]).values())
        assert len(seen) == 3
        embedding = 4 * 2048 * 192
        linear = sizes[None] - embedding
        assert (sizes["int8"] - embedding) / linear == pytest.approx(0.26, abs=0.02)
        assert (sizes["int4"] - embedding) / linear == pytest.approx(0.16, abs=0.02)  # scales in float32


@pytest.fixture(scope="module", params=SCHEMES)
def server(request: pytest.FixtureRequest) -> Iterator[tuple[Scheme, str]]:
    """The rotary demo model in 8 or 4 bits."""
    pytest.importorskip("torchao")
    with local_server(settings(model=str(DEMO / "ropeway-demo"), quantization=request.param)) as url:
        yield request.param, url


SCORED: dict[str, Any] = {
    "input": "It was a truth that the ropes of the harbour had been cut in the night. " * 28,
    "methods": ["default", "yarn:4"],
    "lengths": [256, 512],
}


@pytest.fixture(scope="module")
def full_precision() -> list[dict[str, Any]]:
    """Perplexities of the rotary demo model in float32."""
    with local_server(settings(model=str(DEMO / "ropeway-demo"))) as url:
        methods: list[dict[str, Any]] = httpx.post(f"{url}/perplexity", json=SCORED, timeout=60).json()["methods"]
    return methods


@pytest.mark.slow
class TestServed:
    def test_tokens_are_those_of_the_quantized_model(self, server: tuple[Scheme, str]) -> None:
        scheme, url = server
        plain: Any = AutoModelForCausalLM.from_pretrained(DEMO / "ropeway-demo", dtype=torch.float32)
        quantize(plain, scheme, CPU)
        prompts = [list(range(5, 60)), [9, 8, 7, 6], list(range(300, 420, 3))]
        body = {"prompt": prompts, "max_new_tokens": 12}
        for prompt, result in zip(prompts, httpx.post(f"{url}/generate", json=body).json()["results"], strict=True):
            wanted = plain.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
            assert result["token_ids"] == wanted.tolist()[: len(result["token_ids"])]
            assert result["token_ids"]

    def test_encodings_share_a_batch(self, server: tuple[Scheme, str]) -> None:
        _, url = server
        encodings = ["default", "yarn:4", "self_extend:neighbor_window=64", "lm_infinite"]
        body: dict[str, Any] = {"prompt": list(range(5, 160)), "max_new_tokens": 6}
        together = httpx.post(f"{url}/generate", json=body | {"pe": encodings}, timeout=60).json()["results"]
        for encoding, result in zip(encodings, together, strict=True):
            (alone,) = httpx.post(f"{url}/generate", json=body | {"pe": encoding}, timeout=60).json()["results"]
            assert result["token_ids"] == alone["token_ids"], encoding

    def test_perplexity_is_near_that_of_full_precision(
        self, server: tuple[Scheme, str], full_precision: list[dict[str, Any]]
    ) -> None:
        scheme, url = server
        found = httpx.post(f"{url}/perplexity", json=SCORED, timeout=60).json()["methods"]
        for one, other in zip(found, full_precision, strict=True):
            for at, expected in zip(one["lengths"], other["lengths"], strict=True):
                ratio = at["perplexity"] / expected["perplexity"]
                assert 0 < abs(ratio - 1) < (0.05 if scheme == "int8" else 0.5)

    def test_the_listing_says_so(self, server: tuple[Scheme, str]) -> None:
        scheme, url = server
        (info,) = httpx.get(f"{url}/models").json()["models"]
        assert info["quantization"] == {"scheme": scheme, "layers": {scheme: 28}}
        assert info["memory"]["weights"] < info["parameters"] * 2.2
        assert info["dtype"] == "float32"
        assert (info["recorded_steps"], info["engine_reason"]) == (True, None)


class TestRefusals:
    def test_without_torchao(self, monkeypatch: pytest.MonkeyPatch, checkpoints: Path) -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "torchao", None)
        result = ropeway("serve", "--port", "0", "--model", str(checkpoints / "tiny"), "--quantization", "int8")
        assert result.exit_code == 1
        told = "error: ROPEWAY_QUANTIZATION: model 'tiny': it needs the package torchao (the extra `quantization`)"
        assert [line for line in result.stderr.splitlines() if line.startswith("error:")] == [told]

    def test_an_unknown_scheme(self) -> None:
        result = ropeway("serve", "--quantization", "int5")
        assert (result.exit_code, "ROPEWAY_QUANTIZATION: Input should be 'int8' or 'int4'" in result.stderr) == (
            1,
            True,
        )

    def test_models_without_linear_layers(self) -> None:
        with pytest.raises(NotQuantized, match="no linear layers"):
            quantize(tiny_model("gpt2")[1], "int8", CPU)

    def test_experts_in_one_tensor(self) -> None:
        model = tiny_model("mixtral", num_local_experts=32)[1]
        with pytest.raises(NotQuantized, match="stacked experts"):
            quantize(model, "int8", CPU)

    @pytest.mark.parametrize("device", ["mps", "xpu"])
    def test_a_device_without_a_kernel(self, device: str) -> None:
        with pytest.raises(NotQuantized, match=f"not for {device}"):
            _int4(32, torch.bfloat16, torch.device(device))

    def test_a_number_format_without_a_kernel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
        with pytest.raises(NotQuantized, match=r"bfloat16, and ROPEWAY_DTYPE makes it torch\.float16"):
            _int4(32, torch.float16, torch.device("cuda"))


@pytest.mark.slow
@needs_torchao
def test_an_adapter_is_merged_before_it_is_quantized(tmp_path: Path) -> None:
    full = tiny_checkpoint(tmp_path / "tiny")
    model: Any = AutoModelForCausalLM.from_pretrained(full)
    torch.manual_seed(0)
    lora = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    lora.save_pretrained(tmp_path / "lora")
    merged = lora.merge_and_unload()
    quantize(merged, "int8", CPU)
    given = settings(model=str(full), quantization="int8", adapters={"tuned": tmp_path / "lora"})
    registry = ModelRegistry(given)
    try:
        tokens = torch.arange(3, 40)[None]
        with torch.no_grad():
            found, wanted = registry.get("tuned").patch.model(tokens).logits, merged(tokens).logits
            base = registry.get("tiny").patch.model(tokens).logits
        torch.testing.assert_close(found, wanted)
        assert float((base - wanted).abs().max()) > 0.1
        assert registry.get("tuned").quantization == registry.get("tiny").quantization
    finally:
        registry.close()
