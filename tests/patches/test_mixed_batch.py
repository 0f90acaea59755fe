"""Requests with different encodings and lengths in one batch: each gets what it gets alone."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from patches import encode, packed_batch, patched
from tests.methods import Fields, rows
from tests.models import TRAINED_LENGTH, tiny_model, tiny_tokens
from tests.patches.forward import left_padded, logits_of, relative, slot_of

TOLERANCE = 2e-5
LENGTHS = [90, 33, 1, 64, 12, 100, 47, 5]
"""On both sides of the trained 64, one a single token, one equal to the trained length."""

FAMILIES = {
    "llama": {},
    "gpt_neox": {},
    "cohere": {},
    "mistral": {"sliding_window": 24},
    "gemma2": {},  # every second layer slides, and scores are soft-capped
}
every_family = pytest.mark.parametrize("family", FAMILIES)

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


@every_family
@pytest.mark.parametrize("start", [0, 5], ids=["first_methods", "last_methods"])
def test_eight_encodings_in_one_batch(family: str, start: int) -> None:
    model = model_of(family)
    tokens, order = prompts(), [3, 0, 7, 5, 1, 6, 2, 4]
    with patched(model) as patch:
        requests = eight(patch.geometry.rotary_dim // 2, start)
        slots = [slot_of(patch, fields, len(row)) for fields, row in zip(requests, tokens, strict=True)]
        assert len(set(slots)) == 8
        alone = [logits_of(model, row[None], slot)[0] for row, slot in zip(tokens, slots, strict=True)]
        mixed = batched(model, tokens, slots)
        shuffled = batched(model, [tokens[i] for i in order], [slots[i] for i in order])
        swapped = logits_of(model, tokens[5][None], slots[0])[0]
    for row in range(8):
        assert relative(mixed[row], alone[row]) < TOLERANCE, requests[row]
        assert relative(shuffled[order.index(row)], alone[row]) < TOLERANCE, requests[row]
    assert relative(mixed[5], swapped) > 0.01, "a row with another row's encoding must show"


def test_equal_rows_of_one_encoding_share_a_segment_and_stay_apart() -> None:
    """Neighbours with the same encoding and length run as one block of rows, whatever stands between blocks."""
    model = model_of("llama")
    tokens = list(tiny_tokens(6, 40))
    with patched(model) as patch:
        a, b = (slot_of(patch, fields, 40) for fields in ({"method": "yarn", "factor": 4.0}, {"method": "self_extend"}))
        slots = [a, a, b, b, b, a]
        mixed = batched(model, tokens, slots)
        for row, slot, result in zip(tokens, slots, mixed, strict=True):
            assert relative(result, logits_of(model, row[None], slot)[0]) < TOLERANCE


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


@torch.no_grad()
def test_position_ids_are_read_anew_in_every_forward() -> None:
    """A caller may keep one tensor: for other rows, for another mask, or rewritten in place."""
    model, tokens = model_of("llama"), tiny_tokens(3, 30)
    position_ids = torch.arange(30)[None].repeat(3, 1)
    with patched(model) as patch:
        slot = slot_of(patch, {"method": "self_extend"}, 30)
        plain = logits_of(model, tokens)
        assert torch.equal(model(tokens, position_ids=position_ids).logits, plain)
        position_ids[1] = encode(position_ids[1], slot)
        assert (
            relative(model(tokens, position_ids=position_ids).logits[1], logits_of(model, tokens, slot)[1]) < TOLERANCE
        )
        position_ids[1], mask = (torch.arange(30) - 9).clamp_min(0), torch.ones_like(tokens)
        mask[1, :9] = 0
        padded = model(tokens, position_ids=position_ids, attention_mask=mask).logits
        assert relative(padded[1, 9:], logits_of(model, tokens[1:2, 9:])[0]) < TOLERANCE
        shared = position_ids[:1]
        assert torch.equal(model(tokens[:2], position_ids=shared).logits, logits_of(model, tokens[:2]))
        assert torch.equal(model(tokens, position_ids=shared).logits, plain)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@torch.no_grad()
def test_right_padding_is_harmless_for_real_tokens(family: str) -> None:
    model = model_of(family)
    tokens = prompts()
    longest = max(LENGTHS)
    ids = torch.stack([pad(row, (0, longest - len(row))) for row in tokens])
    mask = torch.stack([pad(torch.ones(len(row)), (0, longest - len(row))) for row in tokens]).long()
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with patched(model) as patch:
        slots = [slot_of(patch, fields, len(row)) for fields, row in zip(eight(8, 3), tokens, strict=True)]
        output = model(ids, attention_mask=mask, position_ids=encode(positions, torch.tensor(slots)[:, None])).logits
        for row, slot, logits in zip(tokens, slots, output, strict=True):
            assert relative(logits[: len(row)], logits_of(model, row[None], slot)[0]) < TOLERANCE


def test_generate_carries_the_slots_of_a_batch() -> None:
    """transformers' own loop counts the encoded positions up, and never knows what they carry."""
    model = model_of("llama")
    tokens = prompts()
    ids, mask, positions = left_padded(tokens)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    with patched(model) as patch:
        slots = [slot_of(patch, fields, len(row) + 8) for fields, row in zip(eight(8, 4), tokens, strict=True)]
        encoded = encode(positions, torch.tensor(slots)[:, None])
        mixed = model.generate(ids, attention_mask=mask, position_ids=encoded, **options)[:, -8:]
        for row, slot, result in zip(tokens, slots, mixed, strict=True):
            position_ids = encode(torch.arange(len(row)), slot)[None]
            alone = model.generate(row[None], position_ids=position_ids, **options)[0, -8:]
            assert torch.equal(result, alone)


@pytest.mark.parametrize("family", ["llama", "mistral"])
@torch.no_grad()
def test_sequences_packed_into_one_row(family: str) -> None:
    """As a paged engine feeds them: end to end, each from its own position 0 and with its own encoding."""
    model, tokens = model_of(family), prompts()
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    with patched(model) as patch:
        slots = [slot_of(patch, fields, len(row)) for fields, row in zip(eight(8, 2), tokens, strict=True)]
        positions = [encode(torch.arange(len(row)), slot) for row, slot in zip(tokens, slots, strict=True)]
        packed = packed_batch([(slot, 0, length) for slot, length in zip(slots, LENGTHS, strict=True)])
        row_of_all, row_of_positions = torch.cat(tokens)[None], torch.cat(positions)[None]
        with patch.packed(packed, {"cu_seq_lens_k": ends}):
            output = model(row_of_all, position_ids=row_of_positions, use_cache=False)
        for row, slot, logits in zip(tokens, slots, output.logits[0].split(LENGTHS), strict=True):
            assert relative(logits, logits_of(model, row[None], slot)[0]) < TOLERANCE


# What a batch must not look like

MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
COUNTED = torch.tensor([[0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])


@pytest.mark.parametrize(
    ("position_ids", "mask", "message"),
    [
        (torch.tensor([[0, 1, 2, 0, 1, 2]]), None, "count up by one"),
        (torch.tensor([[0, 2, 4, 6, 8, 10]]), None, "count up by one"),
        (torch.tensor([[0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12]]), None, "start alike"),
        (torch.arange(6).expand(2, -1), MASK, "first unpadded token"),
        (COUNTED + 1, MASK, "first unpadded token"),
        (encode(torch.arange(6), torch.tensor([[0, 0, 0, 1, 1, 1]])), None, "same slot"),
        (encode(COUNTED, torch.tensor([[0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 2]])), MASK, "same slot"),
    ],
    ids=["packed", "strided", "shifted_row", "padding_counted", "shifted", "two_slots", "two_slots_padded"],
)
@torch.no_grad()
def test_wrong_position_ids_are_refused(position_ids: torch.Tensor, mask: torch.Tensor | None, message: str) -> None:
    model = model_of("llama")
    with patched(model), pytest.raises(ValueError, match=message):
        model(tiny_tokens(len(position_ids), 6), attention_mask=mask, position_ids=position_ids)


@torch.no_grad()
def test_a_slot_without_an_encoding_is_refused() -> None:
    model = model_of("llama")
    with patched(model), pytest.raises(IndexError, match="slot 9"):
        model(tiny_tokens(1, 6), position_ids=encode(torch.arange(6)[None], 9))


@torch.no_grad()
def test_a_ready_made_mask_is_refused() -> None:
    model = model_of("llama")
    dense = torch.ones(1, 1, 6, 6).tril().bool()
    with patched(model), pytest.raises(ValueError, match="padding mask"):
        model(tiny_tokens(1, 6), attention_mask=dense)
