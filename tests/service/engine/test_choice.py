"""The engine of a model: pages, the padded one together or row by row, scores only, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.cache_utils import LinearAttentionLayer
from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR

from patches import Patched, encode, patched
from service.engine.adapter.configuration import ATTENDING
from service.engine.choice import CHOICES, CannotGenerate
from service.engine.padded import forward, sequence
from service.engine.padded.caches import row_of
from service.engine.verification import verify
from service.models.checkpoint.loading import ModelLoadError
from tests.field import configurations as field
from tests.models import tiny_model
from tests.service.conftest import tiny_checkpoint
from tests.service.engine.test_verification import Double, cropped_value, registry

HYBRIDS = ("qwen3_next", "qwen3_5_text", "granitemoehybrid", "minimax", "olmo_hybrid")
"""Layers that keep a state instead of keys and values: pages cannot cache them."""


@pytest.mark.parametrize("name", HYBRIDS)
def test_layers_that_keep_a_state_go_to_the_padded_engine(name: str) -> None:
    with patched(field.tiny_model(name)) as patch:
        choice = verify(patch)
        assert (choice.kind, choice.together) == ("padded", True)
        assert "layers of the types linear_attention. Types that can be served are" in str(choice.reason)
        assert patch.slots.in_use() == 0


def lost_padding(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(forward, "_padding_mask", lambda *_: None)


def swapped_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sequence, "row_of", lambda cache, row, num_tokens: row_of(cache, 0, num_tokens))


@pytest.mark.parametrize("double", [lost_padding, swapped_rows])
def test_rows_that_cannot_share_a_forward_run_alone(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    double(monkeypatch)
    with patched(field.tiny_model("olmo_hybrid")) as patch:
        choice = verify(patch)
        assert (choice.kind, choice.together) == ("padded", False)
        assert "; the padded engine " in str(choice.reason)


def test_a_cache_of_unknown_states_runs_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = LinearAttentionLayer.lazy_initialization

    def also(self: Any, *args: Any, **kwargs: Any) -> None:
        self.memory = torch.zeros(1, 3)
        lazy(self, *args, **kwargs)

    monkeypatch.setattr(LinearAttentionLayer, "lazy_initialization", also)
    with patched(field.tiny_model("olmo_hybrid")) as patch:
        choice = verify(patch)
    assert (choice.kind, choice.together) == ("padded", False)
    assert "the padded engine fails on it: a LinearAttentionLayer has memory" in str(choice.reason)


def test_the_types_of_layers_are_those_that_pages_hold() -> None:
    assert set(ATTENDING) == {*ATTN_TYPE_TO_ALLOCATOR, "chunked_attention"}


# At start


def test_the_server_takes_the_padded_engine_where_pages_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint(tmp_path / "cropping")
    cropped_value(monkeypatch)
    models = registry(folder)
    try:
        choice = models.default.engine.choice
        assert choice.kind == "padded"
        assert str(choice.reason).startswith("the paged engine does not compute")
    finally:
        models.close()


def test_the_server_only_scores_where_no_engine_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoint(tmp_path / "cropping")
    cropped_value(monkeypatch)
    monkeypatch.setattr(forward, "encode", lambda position_ids, slots: encode(position_ids, 0 * slots))
    models = registry(folder)
    try:
        with pytest.raises(CannotGenerate, match=r"model 'cropping' is scored only.*the paged engine does not compute"):
            models.default.check_generates()
    finally:
        models.close()


def test_the_server_refuses_by_name(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "broken")
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_output_embeddings().weight[3] = float("nan")
    model.save_pretrained(folder)
    with pytest.raises(ModelLoadError, match="model 'broken' cannot be served: the paged engine does not compute"):
        registry(folder)


def test_a_refused_patch_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cleared = tiny_model("llama")[1], []
    forget = Patched.forget_encodings
    monkeypatch.setattr(Patched, "forget_encodings", lambda self: (cleared.append(self), forget(self)))
    cropped_value(monkeypatch)
    monkeypatch.setattr(forward, "encode", lambda position_ids, slots: encode(position_ids, 0 * slots))
    with patched(model) as patch:
        assert not verify(patch).generates
    assert len(cleared) == len(CHOICES), "after every check that failed"
    assert not str(model.config._attn_implementation).startswith("ropeway")
