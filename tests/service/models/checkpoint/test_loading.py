"""Checkpoints whose files contradict each other or hold wrong values: each fault is named when the server starts."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import CapturingLogger

from service.models.checkpoint.loading import ModelLoadError, load
from service.models.registry import ModelRegistry
from service.settings import Settings
from tests.patches.model.architectures.test_multimodal import wrapper
from tests.service.conftest import tiny_checkpoint, tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "tiny")


def edit(file: Path, **content: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | content))


def refused(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as refusal:
        load("tiny", folder, Settings(_env_file=None, device="cpu"))
    return str(refusal.value)


# config.json


def rotating(**entries: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **entries}}


YARN = {"rope_type": "yarn", "original_max_position_embeddings": 64}
LONGROPE = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64, "long_factor": [2.0] * 3}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        *(
            (rotating(rope_theta=theta), f"rope_parameters.rope_theta {theta!r} is no finite number above 1")
            for theta in ("10000", None, 0, -5, 1.0, math.nan)
        ),
        (rotating(rope_type="foo"), "rope_parameters.rope_type 'foo' is none of default, dynamic, linear, llama3, "),
        (rotating(rope_type=["yarn"]), "rope_parameters.rope_type ['yarn'] is none of default, "),
        (rotating(**YARN, factor="4"), "rope_parameters.factor '4' is no finite number"),
        (rotating(**YARN, factor=4.0, beta_fast="x"), "rope_parameters.beta_fast 'x' is no finite number"),
        (
            rotating(**LONGROPE, short_factor=[1.0] * 3),
            "rope_parameters.short_factor has 3 numbers, and the model turns ",
        ),
        (rotating(**LONGROPE, short_factor=[0.0]), "rope_parameters.short_factor is no list of finite numbers above 0"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "foo", "rope_theta": 1e4}}},
            "rope_parameters.full_attention.rope_type 'foo' is none of default, ",
        ),
        ({"rope_parameters": None, "rope_scaling": "yarn", "rope_theta": 1e4}, "rope_scaling 'yarn' is no object"),
        ({"max_position_embeddings": 0}, "max_position_embeddings 0 is no number of tokens, 1 or more"),
        ({"max_position_embeddings": None}, "Validation error for field 'max_position_embeddings': "),
        ({"model_type": None}, "it has no model_type"),
        ({"model_type": "foo_net"}, "model_type 'foo_net' is none that transformers "),
        (
            {"model_type": "minicpm", "auto_map": {"AutoConfig": "configuration_minicpm.MiniCPMConfig"}},
            "model_type 'minicpm' is none that transformers ",
        ),
    ],
)
def test_a_wrong_value_in_the_configuration_is_named(content: dict[str, Any], told: str, folder: Path) -> None:
    edit(folder / "config.json", **content)
    refusal = refused(folder)
    assert f"cannot be loaded: its config.json: {told}" in refusal
    assert "trust_remote_code" not in refusal
    assert "pip install" not in refusal


def test_a_configuration_that_is_no_object_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("[1]")
    assert "its config.json: it is no JSON object" in refused(folder)


def test_an_unexpected_error_has_its_class_and_its_place(folder: Path) -> None:
    edit(folder / "config.json", hidden_act="foo")
    assert re.search(r"its weights: KeyError in transformers/activations\.py, line \d+: 'foo'$", refused(folder))


def test_a_type_without_a_language_model_is_named(folder: Path) -> None:
    edit(folder / "config.json", model_type="voxtral")
    assert refused(folder).endswith("of model_type 'voxtral', and custom code of a checkpoint is not run")


# Paths


@pytest.mark.parametrize(("name", "told"), [("config.json", "name"), ("a.GGUF", "GGUF files are not loaded: name")])
def test_a_file_is_no_model(name: str, told: str, folder: Path) -> None:
    (folder / name).touch()
    assert refused(folder / name).endswith(f": it is a file, and {told} the folder of the Hugging Face checkpoint")


def test_a_folder_with_gguf_files_alone_is_refused_as_such(tmp_path: Path) -> None:
    (tmp_path / "model-Q4_K_M.gguf").touch()
    assert refused(tmp_path).endswith("the folder has no config.json, and GGUF files are not loaded")


@pytest.mark.parametrize("path", ["./absent", "/no/such/path", "one/two/three"])
def test_a_path_that_does_not_exist_is_no_name_of_the_hub(path: str) -> None:
    with pytest.raises(ModelLoadError, match=f"'{path}' cannot be loaded: this folder does not exist, and "):
        load("tiny", path, Settings(_env_file=None, device="cpu"))


# Other files


def test_an_adapter_is_no_model(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")
    end = f"no config.json; it is an adapter: serve its base model with --adapter {folder.name}={folder}"
    assert refused(folder).endswith(end)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_folder_without_a_tokenizer_is_refused(kind: str, folder: Path) -> None:
    """Of some types, transformers would make one that has no word, and every text would be empty."""
    edit(folder / "config.json", model_type=kind)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert "its tokenizer: its files are missing or hold no words, such as tokenizer.json. Copy " in refused(folder)


# Weights


def test_weights_that_are_not_numbers_are_told(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][:] = math.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match="cannot be served: its logits are not finite numbers"):
        ModelRegistry(Settings(_env_file=None, device="cpu", model=str(folder), cache_tokens=1024))


def test_weights_that_the_model_has_no_place_for_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = CapturingLogger()
    monkeypatch.setattr("service.models.checkpoint.loading.log", log)
    edit(folder / "config.json", num_hidden_layers=1)
    load("tiny", folder, Settings(_env_file=None, device="cpu"))
    (warning,) = log.calls
    assert (warning.method_name, warning.args) == ("warning", ("weights_left_out",))
    assert (warning.kwargs["model"], warning.kwargs["tensors"]) == ("tiny", 9)
    assert warning.kwargs["first"][0] == "model.layers.1.input_layernorm.weight"


def test_weights_that_transformers_ignores_are_not_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = CapturingLogger()
    monkeypatch.setattr("service.models.checkpoint.loading.log", log)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    load("tiny", folder, Settings(_env_file=None, device="cpu"))
    assert not log.calls


class Lines(logging.Handler):
    """Everything that transformers logs."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


@pytest.fixture
def lines() -> Iterator[list[str]]:
    handler, logger = Lines(), logging.getLogger("transformers.modeling_utils")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)  # a server for one command raises that of its parent
    yield handler.told
    logger.setLevel(before)
    logger.removeHandler(handler)
    assert not logger.filters


@pytest.mark.parametrize("layers", [1, 3], ids=["unexpected", "missing"])
def test_transformers_does_not_tell_of_the_weights_again(folder: Path, lines: list[str], layers: int) -> None:
    edit(folder / "config.json", num_hidden_layers=layers)
    with suppress(ModelLoadError):
        load("tiny", folder, Settings(_env_file=None, device="cpu"))
    assert [line for line in lines if "LOAD REPORT" in line] == []


def test_a_report_of_failed_conversions_stays(folder: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The error after it refers to it."""
    told = logging.getLogger("transformers.modeling_utils")

    def fails(*_: Any, **__: Any) -> None:
        told.warning("Tiny LOAD REPORT from: tiny\nq_proj | CONVERSION |")
        raise RuntimeError("look at the CONVERSION entries of the above report")

    monkeypatch.setattr("transformers.LlamaForCausalLM.from_pretrained", fails)
    with pytest.raises(ModelLoadError, match="CONVERSION"):
        load("tiny", folder, Settings(_env_file=None, device="cpu"))
    assert ["CONVERSION" in line for line in lines] == [True]


# The end of an answer


@pytest.mark.parametrize("end", ["2", [1, "2"], True, {"id": 1}])
def test_an_end_that_is_no_token_is_refused(end: Any, folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=end)
    expected = f"its generation_config.json has eos_token_id {end!r}, which is neither a token id nor a list of them"
    assert f"cannot be loaded: {expected}" in refused(folder)


def test_a_text_part_without_an_end_is_served(tmp_path: Path) -> None:
    model = wrapper("qwen3_vl")
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    registry = ModelRegistry(Settings(_env_file=None, device="cpu", model=str(tmp_path), cache_tokens=1024))
    try:
        assert registry.default.engine.eos_token_ids == ()
    finally:
        registry.close()
