"""Checkpoints whose files contradict each other or hold wrong values: each fault is named when the server starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from service.models.loading import ModelLoadError, load
from service.models.registry import ModelRegistry
from service.settings import Settings
from tests.patches.model.test_multimodal import wrapper
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
