"""Requests with different encodings and lengths in one batch: each gets what it gets alone."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from patches import METHODS, Patched, ResolvedRecipe, encode, packed_batch, parse, patched
from service.models import architecture
from tests.methods import OTHER_ROWS, RELATIVE_ROWS, Fields, rows
from tests.models import TRAINED_LENGTH, VOCAB_SIZE, randomise, tiny_model, tiny_tokens
from tests.patches.forward import left_padded, logits_of, relative, slot_of

TOLERANCE = 2e-5
LENGTHS = [90, 33, 1, 64, 12, 100, 47, 5]
"""On both sides of the trained 64, one a single token, one equal to the trained length."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt_neox": {},
    "cohere": {},
    "mistral": {"sliding_window": 24},
    "gemma2": {},  # every second layer slides, and scores are soft-capped
}

DYNAMIC: Fields = {"method": "dynamic", "factor": 2.0}


def model_of(family: str) -> PreTrainedModel:
    attention = "eager" if family == "gemma2" else "sdpa"
    return tiny_model(family, attn_implementation=attention, **FAMILIES[family])[1]


def eight(pairs: int, start: int) -> list[Fields]:
    """Eight requests of eight methods, in the order of the table from ``start`` on."""
    table = rows(pairs, TRAINED_LENGTH)
    return [table[(start + i) % len(table)].requests[i % 2] for i in range(8)]


def prompts() -> list[torch.Tensor]:
    return [tiny_tokens(1, length, seed=length)[0] for length in LENGTHS]


@torch.no_grad()
def batched(model: PreTrainedModel, tokens: list[torch.Tensor], slots: list[int]) -> list[torch.Tensor]:
    """Logits [length, vocabulary] of every row of one left-padded batch, without its padding."""
    ids, mask, positions = left_padded(tokens)
    output = model(ids, attention_mask=mask, position_ids=encode(positions, torch.tensor(slots)[:, None])).logits
    return [logits[mask[row].bool()] for row, logits in enumerate(output)]


KINDS = ("none", "streaming", "lm_infinite", "self_extend", "alibi", "dynamic", "rerope", "kerple_log")
"""Requests of every kind of method, to fill a batch."""
SIXTEEN = [90, 33, 1, 64, 12, 100, 47, 5, 65, 70, 2, 99, 81, 30, 63, 17]
BATCHES = 3


def sixteen(pairs: int, batch: int, whole_head: bool) -> list[Fields]:
    """Every ``BATCHES``-th method of the table from ``batch`` on, and other kinds up to 16; easy and hard in turn.

    Some get a temperature as well. Between them the batches hold every method.
    """
    table = [row for row in rows(pairs, TRAINED_LENGTH) if whole_head or not row.whole_head]
    chosen = table[batch::BATCHES]
    chosen += [row for name in KINDS for row in table if row.name == name and row not in chosen]
    requests = [row.requests[(batch + index) % 2] for index, row in enumerate(chosen[:16])]
    for fields in requests[2::5]:
        if fields["method"] != "drope":  # its factor is a temperature
            fields.setdefault("attention_temperature", "log_n")
    return requests


def kinds(recipes: list[ResolvedRecipe]) -> set[str]:
    """The kinds of parts that the recipes of a batch have."""
    found: set[str] = set()
    for resolved in recipes:
        recipe = resolved.recipe
        found.add(resolved.rotates_at)
        found |= {"bias"} if recipe.score_bias is not None else set()
        found |= {"temperature"} if recipe.attention_temperature is not None else set()
        found |= {"window"} if recipe.sink_window is not None else set()
        found |= {"by length"} if resolved.length is not None else set()
    return found


@torch.no_grad()
def packed_logits(
    model: PreTrainedModel, patch: Patched, tokens: list[torch.Tensor], slots: list[int]
) -> list[torch.Tensor]:
    """Logits [length, vocabulary] of every sequence of one packed row."""
    lengths = [len(row) for row in tokens]
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = [encode(torch.arange(length), slot) for length, slot in zip(lengths, slots, strict=True)]
    batch = packed_batch([(slot, 0, length) for slot, length in zip(slots, lengths, strict=True)])
    with patch.packed(batch, {"cu_seq_lens_k": ends}):
        output = model(torch.cat(tokens)[None], position_ids=torch.cat(positions)[None], use_cache=False)
    return list(output.logits[0].split(lengths))


@pytest.mark.parametrize(
    ("family", "batch"),
    [*itertools.product(("llama", "gpt_neox", "cohere"), range(BATCHES)), ("mistral", 0), ("gemma2", 0)],
)
def test_sixteen_methods_in_one_batch(family: str, batch: int) -> None:
    """Whole, partial and interleaved rotary, and layers that slide; padded and packed."""
    model = model_of(family)
    tokens = [tiny_tokens(1, length, seed=row)[0] for row, length in enumerate(SIXTEEN)]
    with patched(model) as patch:
        geometry = patch.geometry
        requests = sixteen(geometry.rotary_dim // 2, batch, geometry.rotary_dim == geometry.head_dim)
        assert len({fields["method"] for fields in requests}) == 16
        slots = [slot_of(patch, fields, len(row)) for fields, row in zip(requests, tokens, strict=True)]
        every = {"never", "cache_write", "cache_read", "bias", "temperature", "window", "by length"}
        assert kinds([patch.slots[slot] for slot in slots]) == every
        alone = [logits_of(model, row[None], slot)[0] for row, slot in zip(tokens, slots, strict=True)]
        padded, packed = batched(model, tokens, slots), packed_logits(model, patch, tokens, slots)
    for row in range(16):
        assert relative(padded[row], alone[row]) < TOLERANCE, requests[row]
        assert relative(packed[row], alone[row]) < TOLERANCE, requests[row]


def test_the_batches_of_sixteen_hold_every_method() -> None:
    batches = [sixteen(8, batch, True) for batch in range(BATCHES)]
    assert {fields["method"] for batch in batches for fields in batch} == {row.name for row in rows(8)}


OTHERS = {"gpt2": "learned", "opt": "learned", "xglm": "sinusoidal", "bloom": "bias", "mpt": "bias", "t5": "bias"}
"""Models that were trained without rotation, and what they count as."""

REASONS: dict[str, str] = {
    "rotary": "without rotary embeddings",
    "learned": "for models trained with learned positions",
    "sinusoidal": "for models trained with sinusoidal positions",
    "relative": "weights that a model learns with it",
}
"""The reason why models of another family refuse a method."""


def other_model(name: str) -> PreTrainedModel:
    if name != "t5":
        return tiny_model(name, attn_implementation="sdpa" if name in ("gpt2", "opt") else "eager")[1]
    architecture.register()
    sizes: Fields = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = architecture.RopewayDemoConfig(
        position_family="t5",
        vocab_size=VOCAB_SIZE,
        intermediate_size=96,
        num_hidden_layers=2,
        max_position_embeddings=TRAINED_LENGTH,
        **sizes,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    randomise(model, 0)
    model.eval()
    return model


@pytest.mark.parametrize("name", OTHERS)
def test_other_families_refuse_what_they_cannot_carry_and_mix_the_rest(name: str) -> None:
    model, length = other_model(name), TRAINED_LENGTH
    table = [*rows(8, TRAINED_LENGTH), *OTHER_ROWS, *RELATIVE_ROWS]
    with patched(model) as patch:
        assert patch.geometry.family == OTHERS[name]
        taken, refused = [], dict[str, str]()
        for row in table:
            for fields in row.requests:
                method = parse(fields)
                try:
                    patch.resolve(method, length)
                    taken.append(fields)
                except ValueError as error:
                    refused[row.name] = str(error)
        families = {row.name: "rotary" if row.rotates else METHODS[row.name].family for row in table}
        own = {row.name for row in table if families[row.name] in ("bias", "none", OTHERS[name])}
        assert {fields["method"] for fields in taken} == own | {"default"}
        for refusal, reason in refused.items():
            assert re.search(REASONS[families[refusal]], reason), (refusal, reason)
        asked = spread(taken, 16)
        tokens = [tiny_tokens(1, min(n, length), seed=n)[0] for n in SIXTEEN]
        slots = [slot_of(patch, fields, len(row)) for fields, row in zip(asked, tokens, strict=True)]
        alone = [logits_of(model, row[None], slot)[0] for row, slot in zip(tokens, slots, strict=True)]
        padded, packed = batched(model, tokens, slots), packed_logits(model, patch, tokens, slots)
    assert len(set(slots)) > 12
    for index, expected in enumerate(alone):
        assert relative(padded[index], expected) < TOLERANCE, asked[index]
        assert relative(packed[index], expected) < TOLERANCE, asked[index]


def spread(requests: list[Fields], count: int) -> list[Fields]:
    """``count`` of ``requests``, from first to last."""
    return [requests[index * len(requests) // count] for index in range(count)]


def test_a_dynamic_request_leaves_nothing_to_the_next() -> None:
    """transformers' own dynamic scaling keeps the longest length it has seen in a shared buffer."""
    model = model_of("llama")
    short, middle, long = (tiny_tokens(1, length) for length in (20, 100, 300))
    with patched(model) as patch:
        slots = [slot_of(patch, DYNAMIC, tokens.shape[1]) for tokens in (short, middle, long)]
        before = logits_of(model, middle, slots[1])
        logits_of(model, long, slots[2])
        assert torch.equal(logits_of(model, middle, slots[1]), before)
        assert torch.equal(logits_of(model, middle, slot_of(patch, DYNAMIC, 100)), before)
        mixed = batched(model, [short[0], middle[0], long[0]], slots)
        assert relative(mixed[1], before[0]) < TOLERANCE
        assert relative(mixed[0], logits_of(model, short)[0]) < TOLERANCE, "within the trained length it is plain"
        assert relative(logits_of(model, middle), before) > 0.01, "past it, it is not"
