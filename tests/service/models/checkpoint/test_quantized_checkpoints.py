"""Checkpoints that another library quantized: served as they are, or refused by the name of a package."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from service.engine.choice import PAGED
from service.models.checkpoint.adapters import Adapter, adapted
from service.models.checkpoint.loading import ModelLoadError, load, quantized
from service.models.registry import ModelRegistry
from tests.models import tiny_model
from tests.service.conftest import tiny_checkpoint, tiny_tokenizer
from tests.service.models.checkpoint.test_quantization import settings

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # peft 0.21
]


@pytest.mark.parametrize(("method", "package"), [("gptq", "optimum"), ("awq", "gptqmodel"), ("hqq", "hqq")])
def test_a_checkpoint_whose_package_is_absent_is_refused_by_its_name(
    method: str, package: str, checkpoints: Path, tmp_path: Path
) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    folder = Path(shutil.copytree(checkpoints / "tiny", tmp_path / "tiny"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 32}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelLoadError, match=rf"(?i)ROPEWAY_MODEL: model .* cannot be loaded: its weights: .*{package}"
    ):
        load("tiny", folder, settings())


@pytest.fixture(scope="module")
def of_torchao(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that torchao quantized."""
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    folder = tmp_path_factory.mktemp("torchao")
    full = tiny_checkpoint(folder / "full")
    config = TorchAoConfig(Int8WeightOnlyConfig(set_inductor_config=False))
    model = AutoModelForCausalLM.from_pretrained(full, dtype=torch.float32, quantization_config=config)
    model.save_pretrained(folder / "quantized")
    AutoTokenizer.from_pretrained(full).save_pretrained(folder / "quantized")
    return folder / "quantized"


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in the format of llm-compressor, int8 with a scale per row."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    folder = tmp_path_factory.mktemp("compressed")
    full = tiny_checkpoint(folder / "full")
    model: Any = AutoModelForCausalLM.from_pretrained(full, dtype=torch.float32)
    arguments = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="channel")
    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=arguments)}
    apply_quantization_config(
        model, QuantizationConfig(config_groups=groups, ignore=["lm_head"], format="pack-quantized")
    )
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.data = module.weight.detach().abs().amax(1, keepdim=True) / 127
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder / "quantized")
    compressor.update_config(folder / "quantized")
    AutoTokenizer.from_pretrained(full).save_pretrained(folder / "quantized")
    return folder / "quantized"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "scheme"), [("of_torchao", "torchao"), ("compressed", "compressed-tensors")])
@torch.no_grad()
def test_a_quantized_checkpoint_is_served(kind: str, scheme: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    tokens = torch.arange(3, 60)[None]
    own: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    full: Any = AutoModelForCausalLM.from_pretrained(folder.parent / "full", dtype=torch.float32)
    registry = ModelRegistry(settings(model=str(folder)))
    try:
        served = registry.default
        assert served.quantization is not None
        assert (served.quantization.scheme, served.quantization.layers) == (scheme, {})
        found = served.patch.model(tokens).logits
        torch.testing.assert_close(found, own(tokens).logits)
        assert float((found - full(tokens).logits).abs().max()) > 0.01
    finally:
        registry.close()


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"bnb_4bit_quant_type": "nf4", "load_in_4bit": True}, {"load_in_8bit": True}])
def test_a_checkpoint_of_bitsandbytes_is_served(fields: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    sizes: dict[str, int] = {"hidden_size": 128, "intermediate_size": 256}  # its kernels read blocks of 64
    model, tokenizer = tiny_model("llama", **sizes)[1], tiny_tokenizer()
    model.save_pretrained(tmp_path / "full")
    quantized_to = BitsAndBytesConfig(**fields)
    own: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "full", quantization_config=quantized_to)
    own.save_pretrained(tmp_path / "quantized")
    tokenizer.save_pretrained(tmp_path / "quantized")
    registry = ModelRegistry(settings(model=str(tmp_path / "quantized")))
    try:
        assert registry.default.engine.choice == PAGED
        assert registry.default.quantization is not None
        assert registry.default.quantization.scheme == "bitsandbytes"
    finally:
        registry.close()


@pytest.mark.slow
def test_a_quantized_checkpoint_takes_no_second_quantization_and_no_adapter(of_torchao: Path, tmp_path: Path) -> None:
    again = settings(quantization="int8")
    with pytest.raises(ModelLoadError, match=r"ROPEWAY_QUANTIZATION: .* is quantized already, by torchao"):
        quantized(load("q", of_torchao, again), again)
    full: Any = AutoModelForCausalLM.from_pretrained(of_torchao.parent / "full")
    get_peft_model(full, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"adapter 'a' .*: its base 'q' is a quantized checkpoint"):
        adapted(load("q", of_torchao, settings()), Adapter("a", tmp_path))
