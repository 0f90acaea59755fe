"""No tensor of all scores: what a long prefill allocates, recorded operation by operation.

Kernels keep their own blocks to themselves; what torch creates outside of them is seen here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.typical import typical
from patches import METHODS, RopeGeometry, parse, patched, resolve
from patches.attention.blocks import QUERY_BLOCK, blocks
from patches.attention.fused import attend
from patches.attention.layer import Layer
from patches.attention.states import SegmentStates
from patches.batch.segments import Batch
from service.models import architecture
from tests.methods import Fields
from tests.models import tiny_model, tiny_tokens
from tests.patches.forward import logits_of, slot_of

LENGTH, TRAINED = 2048, 256
MODELS = {"rotary": "llama", "bias": "llama", "none": "llama", "learned": "gpt2", "sinusoidal": "xglm"}
"""Family of a method -> the model that takes it; relative ones need the one that learned theirs."""


class Largest(TorchDispatchMode):
    """Elements and name of the largest tensor that an operation returned. Views of what was there do not count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements, self.operation = 0, ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                held = tensor.untyped_storage().nbytes() // tensor.itemsize  # an expanded tensor holds less
                if min(held, tensor.numel()) > self.elements:
                    self.elements, self.operation = min(held, tensor.numel()), str(func)
        return result


def model_for(name: str, heads: int) -> PreTrainedModel:
    """One layer of 16-dimensional heads."""
    family = METHODS[name].family
    sizes: dict[str, Any] = {"hidden_size": 16 * heads, "num_attention_heads": heads, "num_hidden_layers": 1}
    if family == "relative":
        return relative_model(name, {**sizes, "head_dim": 16, "num_key_value_heads": heads})
    if family in ("learned", "sinusoidal"):
        other = {"gpt2": {}, "xglm": {"d_model": 16 * heads, "num_layers": 1, "attention_heads": heads}}
        model = MODELS[family]
        attention = "sdpa" if model == "gpt2" else "eager"
        longer = {"max_position_embeddings": LENGTH, **sizes, **other[model]}
        return tiny_model(model, attn_implementation=attention, **longer)[1]
    sizes |= {"num_key_value_heads": heads, "max_position_embeddings": TRAINED}
    return tiny_model("llama", attn_implementation="sdpa", **sizes)[1]


def relative_model(name: str, sizes: dict[str, Any]) -> PreTrainedModel:
    architecture.register()
    config = architecture.RopewayDemoConfig(
        position_family=name, vocab_size=128, intermediate_size=32, max_position_embeddings=TRAINED, **sizes
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    model.eval()
    return model


def largest(model: PreTrainedModel, fields: Fields) -> Largest:
    """Of one prefill of ``LENGTH`` tokens."""
    tokens = tiny_tokens(1, LENGTH)
    with patched(model) as patch:
        slot = slot_of(patch, fields, LENGTH)
        seen = Largest()
        with seen:
            logits_of(model, tokens, slot)
    return seen


@pytest.mark.parametrize("name", METHODS)
def test_a_prefill_never_holds_all_scores(name: str) -> None:
    model = model_for(name, heads=1)
    with patched(model) as patch:
        fields = typical(patch.geometry)[name]
    seen = largest(model, fields)
    assert LENGTH <= seen.elements <= QUERY_BLOCK * LENGTH, seen.operation


BY_KEY = {"method": "alibi", "bias_dtype": "bfloat16"}
"""A bias that distance alone does not decide: every block has its own numbers."""


@pytest.mark.parametrize("name", ["alibi", "kerple_log", "kerple_power", "sandwich", "t5_bias"])
def test_a_bias_by_distance_is_a_row_of_numbers_per_head(name: str) -> None:
    heads, model = 4, model_for(name, heads=4)
    with patched(model) as patch:
        fields = typical(patch.geometry)[name]
    seen = largest(model, fields)
    assert seen.elements == LENGTH * model.config.vocab_size  # the logits
    assert seen.elements < heads * QUERY_BLOCK * LENGTH


@pytest.mark.parametrize("fields", [BY_KEY, {"method": "shaw"}], ids=["alibi", "shaw"])
def test_other_biases_are_bounded_per_head(fields: Fields) -> None:
    heads, model = 4, model_for(fields["method"], heads=4)
    seen = largest(model, fields)
    assert QUERY_BLOCK * LENGTH < seen.elements <= heads * QUERY_BLOCK * LENGTH, seen.operation


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_layers_without_a_fused_kernel_are_bounded_too(family: str) -> None:
    """Their scores are in the open, one block at a time; a sink is one more column."""
    sizes: Fields = {"num_attention_heads": 1, "num_key_value_heads": 1, "hidden_size": 16, "num_hidden_layers": 2}
    model = tiny_model(family, **sizes)[1]
    for fields in ({"method": "default"}, {"method": "self_extend", "group_size": 64, "neighbor_window": 16}):
        seen = largest(model, fields)
        assert seen.elements <= QUERY_BLOCK * (LENGTH + 1), seen.operation


def test_the_rest_of_a_begun_chunk_is_bounded_too() -> None:
    """The segment begins one token into a chunk of half its length."""
    geometry = RopeGeometry(16, 16, 1e4, LENGTH, LENGTH, 1)
    fields = {"method": "dual_chunk", "formulation": "paper", "chunk_size": LENGTH // 2}
    resolved = resolve(parse(fields), geometry, 2 * LENGTH)
    query, states = torch.randn(1, 1, LENGTH, 16), torch.randn(1, 1, LENGTH + 1, 16)
    with Largest() as seen:
        attend(query, states, states, resolved, Batch([]), Layer(0.25), q_start=1)
    assert seen.elements <= QUERY_BLOCK * LENGTH, seen.operation


def test_masked_blocks_have_half_the_queries() -> None:
    """A row of a mask is one query's, so fewer rows have fewer pairs that nothing needs."""
    seen = largest(model_for("alibi", heads=1), BY_KEY)
    assert seen.elements <= QUERY_BLOCK // 2 * LENGTH, seen.operation


def test_a_long_bias_by_distance_goes_by_large_blocks() -> None:
    geometry = RopeGeometry(16, 16, 1e4, LENGTH, LENGTH, 1)
    for name, length, queries in (("alibi", LENGTH, 256), ("alibi", 300, 128), ("default", LENGTH, 128)):
        states = torch.randn(1, 1, length, 16)
        recipe = resolve(parse(name), geometry, LENGTH)
        segment = SegmentStates(states, states, states, recipe, Batch([]), Layer(0.25), 0, 0)
        assert next(blocks(segment)) == slice(0, queries)


def test_the_recorder_sees_a_score_matrix() -> None:
    """The unpatched eager attention, and blocks as long as the input: both must be noticed."""
    model = tiny_model("llama", num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=1)[1]
    with Largest() as seen, torch.no_grad():
        model(tiny_tokens(1, 2048))
    assert seen.elements >= 2048 * 2048


def test_without_blocks_the_bound_would_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patches.attention.blocks.QUERY_BLOCK", 2 * LENGTH)
    model = model_for("alibi", heads=1)
    assert largest(model, BY_KEY).elements == LENGTH * LENGTH > QUERY_BLOCK * LENGTH
