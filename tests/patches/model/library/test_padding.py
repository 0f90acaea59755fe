"""Padding masks and positions that users give: padding at both ends has no effect, anything else is refused."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from patches import encode, patched
from tests.models import tiny_tokens
from tests.patches.forward import relative, slot_of

TOLERANCE = 2e-5
REQUESTS = ({"method": "default"}, {"method": "yarn", "factor": 4.0}, {"method": "alibi"}, {"method": "self_extend"})
LEFT = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize("fields", REQUESTS, ids=lambda fields: str(fields["method"]))
@pytest.mark.parametrize("pad", [0, 1, 5, 700], ids="pads_at_{}".format)
@torch.no_grad()
def test_padding_has_no_effect_and_any_position(pad: int, fields: dict[str, object], llama: PreTrainedModel) -> None:
    """On the left, on the right, and on both sides, against each text alone."""
    tokens, lengths, before = tiny_tokens(3, 12), (9, 7, 12), (3, 2, 0)
    column, first = torch.arange(12)[None], torch.tensor(before)[:, None]
    mask = (column >= first) & (column < first + torch.tensor(lengths)[:, None])
    positions = (column - first).masked_fill(~mask, pad)
    with patched(llama) as patch:
        slot = slot_of(patch, fields, 12)
        padded = llama(tokens, attention_mask=mask.long(), position_ids=encode(positions, slot)).logits
        for row, (start, length) in enumerate(zip(before, lengths, strict=True)):
            text = slice(start, start + length)
            alone = llama(tokens[row : row + 1, text], position_ids=encode(torch.arange(length)[None], slot)).logits
            assert relative(padded[row, text], alone[0]) < TOLERANCE
        patch.slots.release(slot)


@pytest.mark.parametrize("given", [False, True], ids=["counted", "given_positions"])
@torch.no_grad()
def test_a_gap_in_a_mask_is_refused(given: bool, llama: PreTrainedModel) -> None:
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 1, 1, 0]])
    positions = {"position_ids": (mask.cumsum(1) - 1).clamp_min(0)} if given else {}
    with patched(llama), pytest.raises(ValueError, match="attention_mask: a row has zeros between its ones"):
        llama(tiny_tokens(2, 8), attention_mask=mask, **positions)


@torch.no_grad()
def test_text_after_padding_on_the_right_is_refused(llama: PreTrainedModel) -> None:
    right = LEFT.flip(1)
    with patched(llama), pytest.raises(ValueError, match="Pad on the left for generate: padding_side='left'"):
        llama.generate(tiny_tokens(2, 8), attention_mask=right, max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize(
    ("positions", "mask"),
    [
        ([[0, 1, 2, 3, 0, 1, 2, 0]], [[1, 1, 1, 1, 1, 1, 1, 0]]),
        ([[0, 0, 0, 0, 1, 2, 2, 4]], [[0, 0, 0, 1, 1, 1, 1, 1]]),
        ([[0, 1, 2, 2, 2, 5, 6, 7]], None),
        ([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 2, 2, 5, 6, 7]], None),
        ([[0, 1, 2, 2, 2, 5, 6, 7]], [[1, 1, 1, 1, 1, 1, 1, 1]]),
    ],
    ids=["packed_and_padded", "inner_under_a_mask", "inner", "inner_of_a_row", "inner_under_ones"],
)
@torch.no_grad()
def test_every_position_of_a_text_is_checked(
    positions: list[list[int]], mask: list[list[int]] | None, llama: PreTrainedModel
) -> None:
    given = None if mask is None else torch.tensor(mask)
    with patched(llama), pytest.raises(ValueError, match="position_ids must count"):
        llama(tiny_tokens(len(positions), 8), attention_mask=given, position_ids=torch.tensor(positions))
