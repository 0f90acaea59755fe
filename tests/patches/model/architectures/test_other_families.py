"""Architectures that the measured seams do not reach, and models whose positions are not rotary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

from patches import encode, packed_batch, patched
from patches.attention import fused, reference
from tests.methods import Fields, request_id
from tests.models import OTHER_FAMILIES, TRAINED_LENGTH, WINDOW, tiny_model, tiny_tokens
from tests.patches.forward import chunked_logits, left_padded, logits_of, relative, slot_of
from tests.patches.model.test_patched import gradients, same, state_of

TOLERANCE = 2e-5
LENGTHS = [90, 33, 1, 64]
"""Past the trained 64, short of it, a single token, and the trained length itself."""

WITHOUT_SDPA = {"gpt_neo", "bloom", "mpt", "xglm"}
"""transformers has only the softmax in the open for them; ours is a fused kernel, so equal up to rounding."""

NOT_TO_THE_BIT = {*WITHOUT_SDPA, "falcon"}
"""Falcon-7B shares one key among all heads, which takes transformers, always with a mask, to another kernel."""

BIASES: list[Fields] = [
    {"method": "alibi", "slope_factor": 2.0},
    {"method": "none"},
    {"method": "kerple_log"},
    {"method": "alibi", "slope_factor": "dynamic"},
]
REQUESTS: dict[str, list[Fields]] = {
    "rotary": [
        {"method": "yarn", "factor": 4.0},
        {"method": "self_extend", "group_size": 4, "neighbor_window": 8},
        {"method": "alibi"},
        {"method": "dynamic", "factor": 2.0},
    ],
    "bias": BIASES,
    "learned": [
        {"method": "learned_interpolation", "factor": 4.0},
        {"method": "learned_hierarchical"},
        {"method": "learned_interpolation", "align": "ends"},
        *BIASES[:2],
    ],
    "sinusoidal": [
        {"method": "sinusoidal_interpolation", "factor": 4.0},
        {"method": "default"},
        {"method": "default", "attention_temperature": 1.5},
        *BIASES[:2],
    ],
}
FAMILY = {
    **dict.fromkeys(OTHER_FAMILIES, "rotary"),
    **dict.fromkeys(("falcon_rw", "bloom", "mpt"), "bias"),
    **dict.fromkeys(("gpt2", "gpt_neo", "opt", "biogpt"), "learned"),
    "xglm": "sinusoidal",
}
every_family = pytest.mark.parametrize("name", OTHER_FAMILIES)
each_request = pytest.mark.parametrize(
    ("name", "fields"),
    [
        pytest.param(name, fields, id=f"{name}-{request_id(fields)}")
        for name in FAMILY
        for fields in REQUESTS[FAMILY[name]]
    ],
)


def model_of(name: str, rope_parameters: dict[str, Any] | None = None, **overrides: Any) -> PreTrainedModel:
    attention = "eager" if name in WITHOUT_SDPA else "sdpa"
    return tiny_model(name, rope_parameters, attn_implementation=attention, **overrides)[1]


@torch.no_grad()
def unpatched(model: PreTrainedModel, tokens: torch.Tensor, **arguments: Any) -> torch.Tensor:
    result: torch.Tensor = model(tokens, **arguments).logits
    return result


def prompts() -> list[torch.Tensor]:
    return [tiny_tokens(1, length, seed=length)[0] for length in LENGTHS]


# The default, and what is left behind


@every_family
def test_the_patched_default_is_the_unpatched_model(name: str) -> None:
    model, tokens = model_of(name), tiny_tokens(2, TRAINED_LENGTH)
    expected = unpatched(model, tokens)
    with patched(model) as patch:
        assert patch.geometry.family == FAMILY[name]
        result = logits_of(model, tokens)
        assert relative(result, expected) < 1e-6
        assert torch.equal(result, expected) or name in NOT_TO_THE_BIT
        assert torch.equal(unpatched(model, tokens), result), "positions that are not given count from 0"


@every_family
def test_a_padded_default_is_the_unpatched_model(name: str) -> None:
    model = model_of(name)
    ids, mask, positions = left_padded([tiny_tokens(1, length, seed=length)[0] for length in (50, 21)])
    arguments: dict[str, Any] = {"attention_mask": mask}
    if name not in ("bloom", "mpt"):  # they count by the mask, or from the right, and take no positions
        arguments["position_ids"] = positions
    expected = unpatched(model, ids, **arguments)
    with patched(model):
        for given in ({**arguments, "position_ids": positions}, {"attention_mask": mask}):
            result = unpatched(model, ids, **given)
            for row in range(2):
                assert relative(result[row, mask[row].bool()], expected[row, mask[row].bool()]) < TOLERANCE


@every_family
def test_restored_to_the_bit(name: str) -> None:
    model, tokens = model_of(name), tiny_tokens(2, TRAINED_LENGTH)
    before, expected = state_of(model), unpatched(model, tokens)
    with patched(model) as patch:
        assert not same(before, state_of(model))
        for fields in REQUESTS[FAMILY[name]]:
            logits_of(model, tiny_tokens(2, 90), slot_of(patch, fields, 90))
    assert same(before, state_of(model))
    with pytest.raises(ZeroDivisionError), patched(model):
        raise ZeroDivisionError
    assert same(before, state_of(model))
    assert torch.equal(unpatched(model, tokens), expected)


@pytest.mark.parametrize("name", ["falcon", "falcon_grouped"])
@pytest.mark.parametrize(
    "rope_parameters",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED_LENGTH},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_falcons_native_scaling_is_its_default(name: str, rope_parameters: dict[str, Any]) -> None:
    model, tokens = model_of(name, rope_parameters), tiny_tokens(1, 200)
    expected = unpatched(model, tokens)
    with patched(model):
        assert relative(logits_of(model, tokens), expected) < 1e-5
    plain = model_of(name)
    with patched(plain) as patch:
        slot = slot_of(patch, {"method": rope_parameters["rope_type"], "factor": 4.0}, 200)
        assert relative(logits_of(plain, tokens, slot), expected) < 1e-5


def test_gptj_is_measured_as_interleaved_and_goes_on_past_its_table() -> None:
    model = model_of("gptj")
    with patched(model) as patch:
        assert (patch.geometry.rotary_dim, patch.geometry.interleaved, patch.geometry.rope_theta) == (8, True, 10_000.0)
        longer = tiny_model("gptj", max_position_embeddings=4 * TRAINED_LENGTH)[1]
        tokens = tiny_tokens(1, 3 * TRAINED_LENGTH)
        assert relative(logits_of(model, tokens), unpatched(longer, tokens)) < 1e-5


def test_the_local_layers_of_gpt_neo_have_a_window() -> None:
    model = model_of("gpt_neo")
    with patched(model) as patch:
        assert patch.windowed == {1: WINDOW}
        assert patch.smallest_window == WINDOW
        assert list(patch.local_masks) == [1]
        tokens = tiny_tokens(1, TRAINED_LENGTH)
        changed = tokens.clone()
        changed[0, 0] = 3 + tokens[0, 0] % 100
        model.transformer.h[0].attn.attention.out_proj.weight.data.zero_()  # no other layer carries it on
        before, after = logits_of(model, tokens), logits_of(model, changed)
        assert not torch.equal(before[0, WINDOW - 1], after[0, WINDOW - 1])
        assert torch.equal(before[0, WINDOW:], after[0, WINDOW:])


# Encodings per request


@each_request
def test_a_request_is_what_the_specification_computes(
    name: str, fields: Fields, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = model_of(name), tiny_tokens(2, 90)
    with patched(model) as patch:
        slot, control = (slot_of(patch, asked, 90) for asked in (fields, {"method": "none"}))
        result = logits_of(model, tokens, slot)
        if slot:
            inside = 0 if fields["method"] == "learned_hierarchical" else TRAINED_LENGTH  # which is the table itself
            others = logits_of(model, tokens[:, :inside]) if inside else logits_of(model, tokens, control)
            assert relative(result[:, : others.shape[1]], others) > 0.01, "it takes effect"
        monkeypatch.setattr(fused, "attend", lambda q, k, v, how, _, *args, **options: specified(q, k, v, how, *args))
        assert relative(logits_of(model, tokens, slot), result) < TOLERANCE


def specified(query: Any, key: Any, value: Any, how: Any, layer: Any) -> torch.Tensor:
    return reference.attend(query, key, value, how, layer, q_start=0)


@every_family
def test_mixed_encodings_in_one_batch_are_each_alone(name: str) -> None:
    model, tokens = model_of(name), prompts()
    requests = REQUESTS[FAMILY[name]][:4]
    ids, mask, positions = left_padded(tokens)
    with patched(model) as patch:
        slots = [slot_of(patch, fields, len(row)) for fields, row in zip(requests, tokens, strict=True)]
        encoded = encode(positions, torch.tensor(slots)[:, None])
        mixed = unpatched(model, ids, attention_mask=mask, position_ids=encoded)
        alone = [logits_of(model, row[None], slot)[0] for row, slot in zip(tokens, slots, strict=True)]
        for row, expected in enumerate(alone):
            assert relative(mixed[row, mask[row].bool()], expected) < TOLERANCE, requests[row]
        swapped = logits_of(model, tokens[3][None], slots[1])[0]
        assert relative(swapped, alone[3]) > 0.01, "a row with another row's encoding must show"


@pytest.mark.slow
@every_family
def test_a_cache_gives_what_one_pass_gives(name: str) -> None:
    model = model_of(name)
    tokens = [tiny_tokens(1, length, seed=length)[0] for length in (84, 29, 3)]
    ids, mask, positions = left_padded(tokens)
    with patched(model) as patch:
        for fields in REQUESTS[FAMILY[name]]:
            slots = [slot_of(patch, fields, len(row)) for row in tokens]
            encoded = encode(positions, torch.tensor(slots)[:, None])
            full = [logits_of(model, row[None], slot)[0] for row, slot in zip(tokens, slots, strict=True)]
            growing, fixed = DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=100)
            for cache, chunks in ((growing, [9, 1, 57, 2, 5, 10]), (fixed, [80, 1, 1, 1, 1])):
                result = chunked_logits(model, ids, mask, encoded, cache=cache, chunks=chunks)
                for row, expected in enumerate(full):
                    case = (request_id(fields), type(cache), chunks, len(expected))
                    assert relative(result[row, mask[row].bool()], expected) < TOLERANCE, case


@every_family
def test_sequences_packed_into_one_row(name: str) -> None:
    model, tokens = model_of(name), prompts()
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    with patched(model) as patch:
        requests = zip(REQUESTS[FAMILY[name]], tokens, strict=False)
        slots = [slot_of(patch, fields, len(row)) for fields, row in requests]
        positions = [encode(torch.arange(len(row)), slot) for row, slot in zip(tokens, slots, strict=True)]
        packed = packed_batch([(slot, 0, length) for slot, length in zip(slots, LENGTHS, strict=True)])
        with patch.packed(packed, {"cu_seq_lens_k": ends}):
            output = unpatched(model, torch.cat(tokens)[None], position_ids=torch.cat(positions)[None], use_cache=False)
        for row, slot, logits in zip(tokens, slots, output[0].split(LENGTHS), strict=True):
            assert relative(logits, logits_of(model, row[None], slot)[0]) < TOLERANCE


@every_family
def test_generate_carries_padding_and_slots(name: str) -> None:
    """Also for models whose loop hands on no positions: without slots, real tokens are counted."""
    model = model_of(name)
    tokens = [tiny_tokens(1, length, seed=length)[0] for length in (40, 17)]
    ids, mask, positions = left_padded(tokens)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    generate: Any = model.generate
    with patched(model) as patch:
        batched = generate(ids, attention_mask=mask, **options)[:, -6:]
        slots = [0, 0]
        for row, result in zip(tokens, batched, strict=True):
            assert torch.equal(result, generate(row[None], **options)[0, -6:])
        if "position_ids" in patch._parameters:
            slots = [slot_of(patch, fields, 50) for fields in REQUESTS[FAMILY[name]][:2]]
            encoded = encode(positions, torch.tensor(slots)[:, None])
            mixed = generate(ids, attention_mask=mask, position_ids=encoded, **options)[:, -6:]
            for row, slot, result in zip(tokens, slots, mixed, strict=True):
                position_ids = encode(torch.arange(len(row)), slot)[None]
                assert torch.equal(result, generate(row[None], position_ids=position_ids, **options)[0, -6:])


@every_family
def test_nothing_inside_the_model_sees_a_slot(name: str) -> None:
    model, tokens = model_of(name), tiny_tokens(1, 30)
    seen: list[int] = []

    def note(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.numel()]
        seen.extend(int(value.max()) for value in tensors if not value.is_floating_point())

    with patched(model) as patch:
        slot = slot_of(patch, REQUESTS[FAMILY[name]][0], 30)
        parts = list(model.modules())[1:]
        handles = [part.register_forward_pre_hook(note, with_kwargs=True) for part in parts]
        logits_of(model, tokens, slot)
        for handle in handles:
            handle.remove()
    assert slot > 0
    assert seen
    assert max(seen) < 1 << 16


@every_family
@torch.no_grad()
def test_half_precision_stays_half_precision(name: str) -> None:
    model, tokens = model_of(name), tiny_tokens(1, TRAINED_LENGTH)
    with patched(model) as patch:
        requests = [{"method": "default"}, REQUESTS[FAMILY[name]][0]]
        exact = [logits_of(model, tokens, slot_of(patch, fields, TRAINED_LENGTH)) for fields in requests]
    with patched(model.bfloat16()) as patch:
        for fields, expected in zip(requests, exact, strict=True):
            result = logits_of(model, tokens, slot_of(patch, fields, TRAINED_LENGTH))
            assert result.dtype == torch.bfloat16
            assert relative(result.float(), expected) < 0.05


@every_family
def test_gradients_of_the_default_are_those_of_the_unpatched_model(name: str) -> None:
    model, tokens = model_of(name), tiny_tokens(2, 40)
    expected = gradients(model, tokens) if name not in ("bloom", "mpt") else gradients_without_positions(model, tokens)
    with patched(model):
        result = gradients(model, tokens)
    assert result.keys() == expected.keys()
    for weight, gradient in result.items():
        if expected[weight].abs().max() > 1e-6:  # softmax ignores a bias on keys: rounding is all it gets
            assert relative(gradient, expected[weight]) < 1e-4, weight


def gradients_without_positions(model: PreTrainedModel, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(tokens, labels=tokens).loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
