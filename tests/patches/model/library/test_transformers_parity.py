"""Patched models against transformers itself: unscaled to the bit, scaled against its own ``rope_parameters``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from patches import parse, patched
from tests.methods import Fields
from tests.models import (
    BY_LAYER_TYPE,
    EAGER_ONLY,
    TRAINED_LENGTH,
    WITH_A_WINDOW,
    every_family,
    tiny_model,
    tiny_tokens,
)
from tests.patches.forward import left_padded, logits_of, relative, slot_of

TOLERANCE = 2e-5
BELOW, ABOVE = 48, 160
"""Lengths on either side of the trained 64; "dynamic" and "longrope" change with them."""

TRAINED = {"original_max_position_embeddings": TRAINED_LENGTH}
YARN = {"rope_type": "yarn", "factor": 4.0, **TRAINED}
SCALINGS: dict[str, Callable[[int], Fields]] = {
    "linear": lambda pairs: {"rope_type": "linear", "factor": 4.0},
    "dynamic": lambda pairs: {"rope_type": "dynamic", "factor": 2.0},
    "yarn": lambda pairs: YARN,
    "yarn, not truncated": lambda pairs: {**YARN, "truncate": False, "beta_fast": 8.0},
    "yarn, mscale pair": lambda pairs: {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn, attention factor": lambda pairs: {**YARN, "attention_factor": 1.3},
    "llama3": lambda pairs: {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        **TRAINED,
    },
    "longrope": lambda pairs: {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": [1.0 + 0.05 * i for i in range(pairs)],
        "long_factor": [2.0 + 0.5 * i for i in range(pairs)],
        **TRAINED,
    },
}
"""transformers' own objects, for a number of rotary pairs: its model reads them, a request pastes them."""

PAIRS = {
    "gpt_neox": 2,
    **dict.fromkeys(("stablelm", "phi", "glm4", "nemotron", "persimmon", "deepseek_v2", "deepseek_v3"), 4),
}
"""Rotary pairs of the families that rotate a part of their 16 dimensions; the others have 8."""


EVERY_SCALING = ("llama", "gpt_neox", "cohere", "gemma3", "deepseek_v3")
"""One family per rotary module: whole, partial, interleaved, by layer type, latent. Others share one of their paths."""


def scalings_of(family: str) -> dict[str, Fields]:
    """The configuration class of Phi-3 knows LongRoPE and nothing else."""
    made = {name: make(PAIRS.get(family, 8)) for name, make in SCALINGS.items()}
    if family in EVERY_SCALING:
        return made
    names = ("longrope",) if family == "phi3" else ("dynamic", "yarn, mscale pair")
    return {name: made[name] for name in names}


def unpatched(family: str, rope_parameters: Fields | None = None, **overrides: Any) -> PreTrainedModel:
    """The model as transformers runs it by default; scaled and unscaled ones share their weights."""
    attention = "eager" if family in EAGER_ONLY else "sdpa"
    return tiny_model(family, rope_parameters, attn_implementation=attention, **overrides)[1]


def greedy(model: PreTrainedModel, tokens: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and logits [steps, rows, vocabulary] of transformers' own cached loop; end tokens do not stop it."""
    output = model.generate(
        tokens,
        max_new_tokens=6,
        min_new_tokens=6,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return output.sequences, torch.stack(output.logits)


@every_family
@torch.no_grad()
def test_default_is_the_unpatched_model_to_the_bit(family: str) -> None:
    model = unpatched(family)
    tokens = tiny_tokens(2, 2 * TRAINED_LENGTH)
    expected = model(tokens).logits
    expected_tokens, expected_steps = greedy(model, tokens)
    with patched(model) as patch:
        assert torch.equal(model(tokens).logits, expected)
        assert torch.equal(logits_of(model, tokens, slot_of(patch, {"method": "default"}, 128)), expected)
        decoded, steps = greedy(model, tokens)
    assert torch.equal(decoded, expected_tokens)
    if family in WITH_A_WINDOW:
        assert relative(steps, expected_steps) < TOLERANCE
    else:
        assert torch.equal(steps, expected_steps)


@every_family
def test_rotating_at_read_what_the_model_rotates_at_write(family: str) -> None:
    """Self-Extend in groups of one is plain RoPE, on raw keys: pairs, width and scaling must be the model's own."""
    model = unpatched(family)
    tokens = tiny_tokens(2, 2 * TRAINED_LENGTH)
    expected = logits_of(model, tokens)
    with patched(model) as patch:
        fields = {"method": "self_extend", "group_size": 1, "neighbor_window": 16}
        assert relative(logits_of(model, tokens, slot_of(patch, fields, 128)), expected) < TOLERANCE


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
@torch.no_grad()
def test_layers_with_a_sliding_window_equal_transformers(family: str) -> None:
    window: Fields = {"sliding_window": 24}
    if family == "qwen2":  # its lower layers see everything
        window |= {"use_sliding_window": True, "max_window_layers": 1}
    model = unpatched(family, **window)
    tokens = tiny_tokens(2, TRAINED_LENGTH)
    expected, (expected_tokens, expected_steps) = model(tokens).logits, greedy(model, tokens)
    whole = unpatched(family)(tokens).logits
    assert relative(whole, expected) > 0.01, "the window must matter at this length"
    with patched(model):
        assert relative(model(tokens).logits, expected) < TOLERANCE
        decoded, steps = greedy(model, tokens)
    assert torch.equal(decoded, expected_tokens)
    assert relative(steps, expected_steps) < TOLERANCE


@every_family
@torch.no_grad()
def test_native_rope_parameters_as_a_request_and_as_the_default(family: str) -> None:
    plain, batches = unpatched(family), [tiny_tokens(2, BELOW), tiny_tokens(2, ABOVE)]
    unscaled = [plain(tokens).logits for tokens in batches]
    for name, rope_parameters in scalings_of(family).items():
        native = unpatched(family, rope_parameters)
        expected = [native(tokens).logits for tokens in batches]
        for tokens, before, logits in zip(batches, unscaled, expected, strict=True):
            untouched = name == "dynamic" and tokens.shape[1] == BELOW
            assert (relative(before, logits) > 0.01) is not untouched, f"{name} must matter"
        # transformers (5.24) ignores "truncate" in rope_parameters by layer type; a request's takes effect.
        if family not in BY_LAYER_TYPE or "truncated" not in name:
            check_request(plain, rope_parameters, batches, expected)
        check_default(native, rope_parameters, batches, expected)


def check_request(
    plain: PreTrainedModel, rope_parameters: Fields, batches: list[torch.Tensor], expected: list[torch.Tensor]
) -> None:
    with patched(plain) as patch:
        for tokens, logits in zip(batches, expected, strict=True):
            result = logits_of(plain, tokens, slot_of(patch, rope_parameters, tokens.shape[1]))
            assert relative(result, logits) < TOLERANCE, rope_parameters


def check_default(
    native: PreTrainedModel, rope_parameters: Fields, batches: list[torch.Tensor], expected: list[torch.Tensor]
) -> None:
    default = {"method": "default"}
    with patched(native) as patch:
        for tokens, logits in zip(batches, expected, strict=True):
            slot = slot_of(patch, default, tokens.shape[1])
            assert torch.equal(logits_of(native, tokens, slot), logits), rope_parameters
        echo = patch.describe(parse(default), ABOVE)
    assert (echo["requested"], echo["method"]) == ("default", rope_parameters["rope_type"])
    assert echo["factor"] == rope_parameters["factor"]


@pytest.mark.parametrize("name", [name for name in SCALINGS if name not in ("dynamic", "longrope")])
@torch.no_grad()
def test_a_native_scaling_decodes_to_the_bit(name: str) -> None:
    """Without slots in sight, as ``model.generate`` runs. Schedules that change while they decode are ours alone."""
    native = unpatched("llama", SCALINGS[name](8))
    tokens = tiny_tokens(2, ABOVE)
    expected_tokens, expected_steps = greedy(native, tokens)
    with patched(native):
        decoded, steps = greedy(native, tokens)
    assert torch.equal(decoded, expected_tokens)
    assert torch.equal(steps, expected_steps)


@pytest.mark.parametrize("family", EVERY_SCALING)
@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_without_an_encoding_the_length_of_a_forward_decides_as_in_transformers(name: str, family: str) -> None:
    """A pass on either side of the trained length, a padded batch of both, and steps that cross it."""
    scaling = scalings_of(family)[name]
    plain, model = unpatched(family, scaling), unpatched(family, scaling)
    long, short = tiny_tokens(1, ABOVE)[0], tiny_tokens(1, BELOW, seed=1)[0]
    ids, mask, positions = left_padded([long, short])

    def outputs(model: PreTrainedModel) -> list[torch.Tensor]:
        one_pass = [model(row[None], use_cache=False).logits for row in (short, long)]
        padded = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[1, -BELOW:]
        return [*one_pass, padded, greedy(model, tiny_tokens(2, TRAINED_LENGTH - 2))[1]]

    with torch.no_grad():
        expected = outputs(plain)
        with patched(model) as patch:
            found = outputs(model)
            assert patch.slots.in_use() == 0, "a forward kept a slot"
    for number, (result, logits) in enumerate(zip(found, expected, strict=True)):
        assert relative(result, logits) < TOLERANCE, number
