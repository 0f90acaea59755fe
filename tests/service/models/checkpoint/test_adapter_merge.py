"""Sums of an adapter and its base: trained tokens over tied weights, and rounding. Plain peft is the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from service.models.checkpoint.adapters import Adapter, adapted
from service.models.checkpoint.fingerprint import contents
from service.models.checkpoint.loading import Checkpoint, ModelLoadError, load
from service.settings import Settings
from tests.service.conftest import tiny_checkpoint

pytestmark = [  # of peft 0.21, where the tests use it
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True.:UserWarning"),
]

ROWS = [5, 9, 30]
TOKENS = torch.tensor([[3, 5, 9, 30, 5, 11, 40, 9, 17, 30]])


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("base") / "tiny")
    if not request.param:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, tie_word_embeddings=False)
        model.lm_head.weight = torch.nn.Parameter(model.get_input_embeddings().weight.detach().clone())
        model.save_pretrained(folder)
        assert not json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    return folder


def plain(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def served(folder: Path, dtype: str = "float32") -> Checkpoint:
    return load("tiny", folder, Settings(_env_file=None, dtype=dtype))


def train(base: Path, adapter: Path, **options: Any) -> Path:
    """An adapter with random numbers in every trained weight."""
    torch.manual_seed(0)
    wrapped = get_peft_model(plain(base), LoraConfig(**{"r": 4, "target_modules": ["q_proj"], **options}))
    with torch.no_grad():
        for weight in wrapped.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.2)
    wrapped.save_pretrained(adapter, save_embedding_layers=False)
    return adapter


@pytest.mark.parametrize(
    "tokens",
    [
        ROWS,
        {"embed_tokens": ROWS},
        {"lm_head": ROWS},
        {"embed_tokens": ROWS, "lm_head": ROWS},
        {"embed_tokens": ROWS, "lm_head": [5, 40]},
    ],
    ids=["list", "embedding", "output", "both", "different"],
)
@torch.no_grad()
def test_trained_tokens_are_where_peft_has_them(tokens: Any, folder: Path, tmp_path: Path) -> None:
    """Over a tied base, peft gives those of the embedding to the output layer too, and saves them once."""
    base = served(folder)
    before = contents(base.model)
    train(folder, tmp_path, trainable_token_indices=tokens)
    wanted = PeftModel.from_pretrained(plain(folder), tmp_path).eval()(input_ids=TOKENS).logits
    merged = adapted(base, Adapter("tuned", tmp_path)).model
    assert float((wanted - merged(TOKENS).logits).abs().max()) < 1e-4 * float(wanted.abs().max())
    assert float((wanted - base.model(TOKENS).logits).abs().max()) > 0.05 * float(wanted.abs().max())
    assert contents(base.model) == before


@pytest.mark.parametrize("folder", [True], indirect=True)
def test_tokens_of_tied_weights_cost_one_matrix(folder: Path, tmp_path: Path) -> None:
    merged: Any = adapted(served(folder), Adapter("tuned", train(folder, tmp_path, trainable_token_indices=ROWS))).model
    assert merged.lm_head.weight is merged.model.embed_tokens.weight


@pytest.mark.parametrize("folder", [True], indirect=True)
def test_tokens_that_the_file_lacks_are_refused(folder: Path, tmp_path: Path) -> None:
    train(folder, tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"trainable_token_indices": ROWS}))
    with pytest.raises(ModelLoadError, match=r"embed_tokens\.token_adapter\.trainable_tokens_delta"):
        adapted(served(folder), Adapter("tuned", tmp_path))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options", [{"target_modules": ["q_proj", "down_proj", "embed_tokens"]}, {"use_dora": True}], ids=["plain", "DoRA"]
)
@pytest.mark.parametrize("folder", [False], indirect=True)
def test_every_sum_is_rounded_once(dtype: torch.dtype, options: Any, folder: Path, tmp_path: Path) -> None:
    """The oracle is peft's merge into the rounded base, as float32 numbers."""
    train(folder, tmp_path, lora_alpha=16, **options)
    exact: Any = PeftModel.from_pretrained(plain(folder, dtype).float(), tmp_path)
    exact = exact.merge_and_unload()
    merged: Any = adapted(served(folder, str(dtype).removeprefix("torch.")), Adapter("tuned", tmp_path)).model
    for name, weight in exact.named_parameters():
        assert torch.equal(merged.get_parameter(name), weight.to(dtype)), name
