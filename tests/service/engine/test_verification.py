"""The engine against the plain forward, before anything is served: who passes, who is caught, what is left behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import CapturingLogger
from transformers import PreTrainedModel

from patches import UnsupportedModel, encode, one_per_route, patched
from patches.batch.segments import Batch
from patches.encoding.masks import CAUSAL, ChunkRange, FirstKeys
from patches.model.attention.packed_attention import PackedAttention
from patches.model.measuring import rounding
from service.engine import verification
from service.engine.adapter import EncodingManager, inputs
from service.engine.adapter.inputs import SlottedInputs
from service.engine.adapter.pages.cache import EncodingCache
from service.engine.choice import PAGED
from service.engine.verification import verify
from service.engine.window import SinkWindow
from service.models.architecture import FAMILIES as DEMO_FAMILIES
from service.models.registry import ModelRegistry
from service.settings import Settings
from tests.models import FAMILIES, OTHER_FAMILIES, WITH_A_WINDOW, by_tier, demo_model, tiny_model
from tests.service.conftest import tiny_tokenizer


def check(model: PreTrainedModel) -> None:
    """Raises:
    UnsupportedModel: when the paged engine does not carry the model.
    """
    with patched(model) as patch:
        choice = verify(patch)
    if choice.kind != "paged":
        raise UnsupportedModel(str(choice.reason))


# Engines that pass


@pytest.mark.parametrize("family", by_tier([*OTHER_FAMILIES, *(name for name in FAMILIES if name in WITH_A_WINDOW)]))
def test_what_the_engine_carries_passes(family: str) -> None:
    check(tiny_model(family)[1])


@pytest.mark.parametrize("family", DEMO_FAMILIES)
def test_demo_families_pass(family: str) -> None:
    check(demo_model(family))


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *(("llama", dtype) for dtype in (torch.float64, torch.float32, torch.float16)),
        *((family, torch.bfloat16) for family in ("llama", "mixtral", "gemma2", "deepseek_v3", "gpt2")),
    ],
)
def test_rounding_passes(family: str, dtype: torch.dtype) -> None:
    check(tiny_model(family)[1].to(dtype))


@pytest.mark.parametrize("sizes", [{"v_head_dim": 24}, {"qk_nope_head_dim": 24, "v_head_dim": 8}])
def test_values_of_another_width_pass(sizes: dict[str, Any]) -> None:
    check(tiny_model("deepseek_v3", **sizes)[1])


def test_a_table_shorter_than_the_prompt_passes() -> None:
    check(tiny_model("gpt2", max_position_embeddings=10)[1])


# Measurements


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
def test_every_route_that_a_model_can_take_is_taken(family: str) -> None:
    with patched(tiny_model(family)[1]) as patch:
        recipes = [patch.resolve(method, 24) for method in one_per_route(patch.geometry, 24)]
        predicates = {type(band.predicate) for resolved in recipes for band in resolved.recipe.bands}
        assert recipes[0] == patch.slots[0]
        assert any(resolved.recipe.score_bias is not None for resolved in recipes)
        if family == "llama":
            assert {resolved.rotates_at for resolved in recipes} == {"never", "cache_write", "cache_read"}
            assert {FirstKeys, ChunkRange} <= predicates
            assert any(patch.sink_window(resolved) is not None for resolved in recipes)
            assert sum(resolved.is_plain for resolved in recipes) == 2
        if family == "gpt2":
            assert any(resolved.recipe.absolute not in (None, recipes[0].recipe.absolute) for resolved in recipes)


def test_it_costs_a_few_forwards_of_a_few_tokens() -> None:
    calls: list[int] = []
    with patched(tiny_model("llama")[1]) as patch:
        patch.model.register_forward_pre_hook(
            lambda _, args, kwargs: calls.append(kwargs["input_ids"].numel()), with_kwargs=True
        )
        assert verify(patch) == PAGED
    assert len(calls) <= 25
    assert sum(calls) <= 450


def test_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[weakref.ref[Any]] = []
    create = EncodingManager._create_batch_processor

    def kept(self: EncodingManager) -> Any:
        processor = create(self)
        built.extend(weakref.ref(part) for part in (processor, processor.cache, processor.cache.cache_tensor))
        return processor

    monkeypatch.setattr(EncodingManager, "_create_batch_processor", kept)
    gc.unfreeze()
    with patched(tiny_model("llama")[1]) as patch:
        verify(patch)
        assert gc.get_freeze_count() == 0
        gc.freeze()  # as for the other tests
        assert [recipe for recipe in patch.slots.recipes if recipe is not None] == [patch.slots[0]]
        assert patch.slots.in_use() == 0
    assert [part() for part in built] == [None] * 6, "freed at once"


# Engines that are caught


Double = Callable[[pytest.MonkeyPatch], None]


def cropped_value(patch: pytest.MonkeyPatch) -> None:
    update = EncodingCache.update

    def crops(*args: Any) -> Any:
        key, value = update(*args)
        return key, torch.nn.functional.pad(value[..., :-1], (0, 1))

    patch.setattr(EncodingCache, "update", crops)


def lost_slots(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(inputs, "encode", lambda position_ids, slots: position_ids)
    prepare = SlottedInputs.prepare_batch_tensors

    def forgets(self: SlottedInputs, *args: Any, **kwargs: Any) -> None:
        prepare(self, *args, **kwargs)
        for number, segment in enumerate(self.batch.segments):
            self.batch.segments[number] = type(segment)(segment.rows, segment.query, 0, segment.q_start, 0)

    patch.setattr(SlottedInputs, "prepare_batch_tensors", forgets)


def pages_given_back_too_early(patch: pytest.MonkeyPatch) -> None:
    evicted = SinkWindow.evicted_pages
    patch.setattr(SinkWindow, "evicted_pages", lambda self, position: evicted(self, position + self.page_size))


def late_positions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(inputs, "encode", lambda position_ids, slots: encode(position_ids + 1, slots))


BROKEN: dict[str, tuple[str, Double, str]] = {
    "a value loses its last number": ("llama", cropped_value, "default"),
    "every slot is the first": ("llama", lost_slots, "yarn"),
    "pages go too early": ("llama", pages_given_back_too_early, "streaming"),
    "a second attention overwrites the first": (
        "diffllama",
        lambda patch: patch.setattr(Batch, "calls_before", lambda self, layer: 0),
        "default",
    ),
    "tokens stand one later": ("gpt2", late_positions, "default"),
}


@pytest.mark.parametrize(("family", "double", "named"), BROKEN.values(), ids=BROKEN)
def test_a_broken_adapter_is_caught(family: str, double: Double, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family)[1]
    check(model)
    double(monkeypatch)
    with pytest.raises(UnsupportedModel, match=rf"does not compute what its own forward computes under {named}\. "):
        check(model)


def test_the_check_reaches_past_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = PackedAttention.attend

    def without_window(self: PackedAttention, *states: Any) -> torch.Tensor:
        *others, layer, index, sinks = states
        return attend(self, *others, replace(layer, mask=CAUSAL), index, sinks)

    monkeypatch.setattr(PackedAttention, "attend", without_window)
    model = tiny_model("mistral", sliding_window=40)[1]
    with pytest.raises(UnsupportedModel, match="the paged engine does not compute"):
        check(model)
    monkeypatch.setattr(verification, "LONGEST", 40)
    check(model)


def registry(folder: Path) -> ModelRegistry:
    return ModelRegistry(Settings(_env_file=None, model=str(folder), device="cpu", cache_tokens=1024))


def test_a_window_beyond_the_check_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = CapturingLogger()
    monkeypatch.setattr("service.models.registry.log", log)
    folder = tmp_path / "windowed"
    tokenizer = tiny_tokenizer()
    tiny_model("mistral", sliding_window=4096, vocab_size=len(tokenizer))[1].save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    registry(folder).close()
    (logged,) = [call.kwargs for call in log.calls if call.args == ("window_beyond_the_check",)]
    assert logged == {"model": "windowed", "window": 4096, "checked_tokens": 24}


@pytest.fixture(scope="module")
def quantized() -> PreTrainedModel:
    """torchao's dynamic int8 rounds activations: float32 at another place in a batch gives another last bit."""
    quantization = pytest.importorskip("torchao.quantization")
    model = tiny_model("llama")[1]
    configuration = quantization.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
    quantization.quantize_(model.model, configuration)
    return model


def test_quantized_layers_may_round(quantized: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    check(quantized)
    monkeypatch.setattr(rounding, "ROUNDED", 0.0)
    with pytest.raises(UnsupportedModel, match="the patched logits differ"):
        check(quantized)


@pytest.mark.parametrize("fault", [fault for fault, (family, *_) in BROKEN.items() if family == "llama"])
def test_faults_are_caught_beside_rounding(
    fault: str, quantized: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, double, named = BROKEN[fault]
    double(monkeypatch)
    with pytest.raises(UnsupportedModel, match=rf"does not compute what its own forward computes under {named}\. "):
        check(quantized)


def test_an_engine_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("heads of two kinds")

    monkeypatch.setattr(EncodingCache, "update", fails)
    with pytest.raises(UnsupportedModel, match="the paged engine fails on it: heads of two kinds"):
        check(tiny_model("llama")[1])


def test_a_model_without_numbers_is_refused() -> None:
    model = tiny_model("llama")[1]
    with torch.no_grad():
        model.get_output_embeddings().weight[3] = float("nan")
    with pytest.raises(UnsupportedModel, match="differ by nan"):
        check(model)
