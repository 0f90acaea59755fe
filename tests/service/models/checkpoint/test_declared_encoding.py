"""Encodings that an adapter's folder declares: logits of plain peft, the trained length, and every refusal."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from patches import parse, patched
from service.models.checkpoint.adapters import Adapter, adapted, by_base
from service.models.checkpoint.loading import Checkpoint, ModelLoadError, load
from service.settings import Settings
from tests.service.conftest import tiny_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

PAIRS = 8
LISTS = {"short_factor": [1 + 0.05 * i for i in range(PAIRS)], "long_factor": [1 + 0.4 * i for i in range(PAIRS)]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64, **LISTS}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
PLAIN = {"rope_type": "default", "rope_theta": 5e5}
TOKENS = torch.arange(150)[None] % 50 + 3


def saved(folder: Path, adapter: Path, **config: Any) -> Checkpoint:
    """A random base and a random adapter of it."""
    base = load("tiny", tiny_checkpoint(folder, **config), Settings(_env_file=None))
    torch.manual_seed(0)
    options: Any = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder), LoraConfig(**options)).save_pretrained(adapter)
    return base


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapter")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, trained: Path) -> Checkpoint:
    return saved(tmp_path_factory.mktemp("base") / "tiny", trained)


def declaring(content: Any, trained: Path, folder: Path) -> Adapter:
    shutil.copytree(trained, folder, dirs_exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    return Adapter("tuned", folder)


@pytest.mark.parametrize(
    ("declared", "of_transformers", "length"),
    [
        ({"rope_theta": 5e5, "rope_scaling": None, "max_position_embeddings": 256}, PLAIN, 256),
        ({"rope_theta": 5e5}, PLAIN, 64),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
            {**PLAIN, "rope_type": "linear", "factor": 4.0},
            64,
        ),
        ({"rope_parameters": PLAIN, "max_position_embeddings": 256}, PLAIN, 256),
        ({"rope_parameters": {"rope_theta": 5e5}, "max_position_embeddings": 256}, PLAIN, 256),
        ({"max_position_embeddings": 256}, {"rope_type": "default", "rope_theta": 1e4}, 256),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 256}, YARN, 64),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "max_position_embeddings": 100},
            {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
            100,
        ),
        ({"rope_scaling": {"type": "su", "factor": 4.0, **LISTS}, "max_position_embeddings": 256}, LONGROPE, 64),
        (
            {
                "rope_scaling": {"type": "su", **LISTS},
                "max_position_embeddings": 128,
                "original_max_position_embeddings": 32,
            },
            {**LONGROPE, "original_max_position_embeddings": 32},
            32,
        ),
    ],
)
@torch.no_grad()
def test_its_logits_are_those_of_peft(
    declared: Any, of_transformers: Any, length: int, base: Checkpoint, trained: Path, tmp_path: Path
) -> None:
    """The oracle is peft over a base that transformers rotates by these parameters."""
    config = {"max_position_embeddings": declared.get("max_position_embeddings", 64)}
    model = AutoModelForCausalLM.from_pretrained(
        base.model.config.name_or_path, rope_parameters=dict(of_transformers), **config
    )
    wanted = PeftModel.from_pretrained(model, trained).eval()(input_ids=TOKENS, use_cache=False).logits
    found = adapted(base, declaring(declared, trained, tmp_path)).model
    with patched(found) as patch:
        logits = found(TOKENS, use_cache=False, **patch.encoding("default", length=TOKENS.shape[1])).logits
        assert patch.geometry.original_max_position_embeddings == length
    assert float((wanted - logits).abs().max()) < 1e-4 * float(wanted.abs().max())


@pytest.mark.parametrize(
    "declared",
    [
        {"max_position_embeddings": 256},
        {"rope_parameters": PLAIN, "max_position_embeddings": 256},
        {"rope_theta": 5e5, "max_position_embeddings": 256},
    ],
)
@torch.no_grad()
def test_its_length_is_that_of_the_merged_checkpoint(
    declared: Any, base: Checkpoint, trained: Path, tmp_path: Path
) -> None:
    """Factors are relative to it, in the merged checkpoint with the same declaration too."""
    tuned = adapted(base, declaring(declared, trained, tmp_path / "adapter"))
    folder = Path(base.model.config.name_or_path)
    merged: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), trained)
    merged.merge_and_unload().save_pretrained(tmp_path / "merged")
    for file in folder.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "merged")
    config = json.loads((folder / "config.json").read_text())
    if "rope_theta" in declared:
        del config["rope_parameters"]  # a file of that time has none
    (tmp_path / "merged/config.json").write_text(json.dumps(config | declared))
    whole = load("whole", tmp_path / "merged", Settings(_env_file=None))
    for encoding in ("default", "yarn:4", "dynamic", "self_extend"):
        logits = []
        for model in (tuned.model, whole.model):
            with patched(model) as patch:
                logits.append(model(TOKENS, use_cache=False, **patch.encoding(encoding, length=512)).logits)
        assert float((logits[0] - logits[1]).abs().max()) < 1e-4 * float(logits[1].abs().max()), encoding


def test_a_base_alone_takes_the_scaling_away(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", tmp_path / "lora", rope_parameters={**YARN, "original_max_position_embeddings": 16})
    for declared, method, length in (
        ({"rope_theta": 5e5}, "default", 16),
        ({"rope_theta": 5e5, "max_position_embeddings": 32}, "default", 32),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic", 16),
        ({"rope_scaling": None, "max_position_embeddings": 128}, "yarn", 16),
    ):
        tuned = adapted(base, declaring(declared, tmp_path / "lora", tmp_path / "declared"))
        with patched(tuned.model) as patch:
            assert patch.describe(parse("default"), 64)["method"] == method
            assert patch.geometry.original_max_position_embeddings == length


def test_the_file_of_its_base_changes_nothing(base: Checkpoint, trained: Path, tmp_path: Path) -> None:
    own = json.loads((Path(base.model.config.name_or_path) / "config.json").read_text())
    with patched(adapted(base, declaring(own, trained, tmp_path)).model) as patch, patched(base.model) as plain:
        assert patch.geometry == plain.geometry


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ([1], "is no JSON object"),
        ({"rope_parameters": {"rope_type": "foo"}}, ".*unknown method 'foo'"),
        ({"rope_scaling": {"type": ["yarn"]}}, r": rope_type \['yarn'\] is no name"),
        ({"rope_parameters": {"rope_type": "linear"}}, ".*factor: required"),
        ({"rope_parameters": {"rope_type": "yarn"}}, ".*factor: required"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "x"}}, ".*factor: must be a number, not 'x'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, ".*'low_freq_factor' is missing or unknown"),
        ({"rope_scaling": {"type": "su", "factor": 4.0}}, ".*short_factor: required; long_factor: required"),
        (
            {"rope_scaling": {"type": "su", "short_factor": [1, 1], "long_factor": [1, 1]}},
            ".*short_factor: this model has 8 rotary pairs, so the list needs 8 values",
        ),
        ({"rope_theta": "x"}, ": rope_theta 'x' is no finite number above 1"),
        ({"rope_theta": 1.0}, ": rope_theta 1.0 is no finite number above 1"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            ": rope_theta None is no finite",
        ),
        ({"max_position_embeddings": "many"}, ": max_position_embeddings 'many' is no number of tokens"),
        ({"max_position_embeddings": True}, ": max_position_embeddings True is no number of tokens"),
    ],
)
def test_a_wrong_declaration_is_refused_in_a_sentence(
    declared: Any, message: str, base: Checkpoint, trained: Path, tmp_path: Path
) -> None:
    adapter = declaring(declared, trained, tmp_path)
    with pytest.raises(ModelLoadError, match=rf"cannot be loaded: its config\.json ?{message}"):
        adapted(base, adapter)


def test_a_table_of_positions_has_its_length(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=64, n_embd=32, n_layer=1, n_head=2)).eval()
    base = Checkpoint("table", model, None)
    options: Any = {"r": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True, "init_lora_weights": False}
    get_peft_model(copy.deepcopy(model), LoraConfig(**options)).save_pretrained(tmp_path / "lora")
    adapted(base, declaring({"max_position_embeddings": 64}, tmp_path / "lora", tmp_path / "same"))
    adapter = declaring({"max_position_embeddings": 128}, tmp_path / "lora", tmp_path / "longer")
    with pytest.raises(ModelLoadError, match="max_position_embeddings 128, and the length of its base is in its weig"):
        adapted(base, adapter)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "its adapter_config.json is no JSON object"),
        (
            {"peft_type": "LORA", "layer_replication": [[0, 1], [0, 2]]},
            "it has layer_replication, and only adapters with the layers of their base are served",
        ),
    ],
)
def test_a_wrong_configuration_is_refused_in_a_sentence(
    content: Any, message: str, trained: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    (tmp_path / "adapter_config.json").write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match=f"cannot be loaded: {message}"):
        by_base({"tuned": tmp_path}, {"tiny": ""})
