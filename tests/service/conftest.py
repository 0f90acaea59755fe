"""A served pair of tiny models (rotary, and an ALiBi variant it declares) behind a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.generation.continuous_batching import continuous_api

from patches import Patched
from service.cli.server import local_server
from service.engine.choice import EngineChoice
from service.engine.verification import verify
from service.models import start
from service.settings import Settings

TEXT = " ".join(f"The {n} ropes of the {n * 7} ways are {n % 13} steps long, and no longer." for n in range(400))


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")


def tiny_checkpoint(folder: Path, seed: int = 0, **config: object) -> Path:
    """A random Llama of 64 trained tokens, saved as a Hugging Face folder."""
    tokenizer = tiny_tokenizer()
    torch.manual_seed(seed)
    fields: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
    }
    model = LlamaForCausalLM(LlamaConfig(**fields | config))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_checkpoint(folder / "tiny", position_encoding_variants={"alibi": "tiny-alibi"})
    tiny_checkpoint(folder / "tiny-alibi", seed=1, position_encoding={"method": "alibi"})
    return folder


@pytest.fixture(scope="session", autouse=True)
def _verified_once(checkpoints: Path) -> Iterator[None]:
    """Engines of the session's checkpoints are chosen once: half of the time that a server of them takes to start."""
    chosen: dict[tuple[str, ...], EngineChoice] = {}

    def remembered(patch: Patched, *options: Any) -> EngineChoice:
        config = patch.model.config
        if not Path(config.name_or_path).is_relative_to(checkpoints):
            return verify(patch, *options)
        key = (config.name_or_path, config.to_json_string(), str(patch.model.dtype), *map(str, options))
        if key not in chosen:
            chosen[key] = verify(patch, *options)
        return chosen[key]

    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(start, "verify", remembered)
        yield


@pytest.fixture(scope="session", autouse=True)
def _garbage_is_collected_by_file() -> Iterator[None]:
    """transformers collects garbage twice when an engine stops, for CUDA's memory: here, of all tests."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(continuous_api, "gc", SimpleNamespace(collect=lambda: 0))
        yield


@pytest.fixture(scope="session")
def settings(checkpoints: Path) -> Settings:
    return Settings(
        _env_file=None,
        model=str(checkpoints),
        cache_tokens=4096,
        score_tokens=4096,
        max_batch_tokens=128,
        max_new_tokens=1024,
        max_queue=64,
        max_scored_tokens=100_000,
        score_chunk=64,
    )


@pytest.fixture(scope="session")
def server(settings: Settings) -> Iterator[str]:
    """Base URL of a running server."""
    with local_server(settings) as url:
        yield url


@pytest.fixture
def client(server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server, timeout=60) as client:
        yield client
