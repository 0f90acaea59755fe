"""Layouts of padded batches: the segments of rows, and the tokens that contradict their padding mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patches import encode
from patches.batch.segments import padded_batch

texts = st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(0, 2))
"""A slot, the tokens of a text, and padding behind it."""


def padded(rows: list[tuple[int, int, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Encoded positions [rows, seen], the mask of the same shape, and padding before each text [rows]."""
    slots, lengths, behind = torch.tensor(rows).T
    seen = int((lengths + behind).max())
    before, column = seen - lengths - behind, torch.arange(seen)
    mask = (column >= before[:, None]) & (column < (before + lengths)[:, None])
    positions = (column - before[:, None]).where(mask, torch.tensor(7))
    return encode(positions, slots[:, None]), mask, before


@settings(max_examples=40)
@given(st.lists(texts, min_size=1, max_size=4), st.data())
def test_rows_have_the_slot_the_positions_and_the_keys_of_their_text(
    rows: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    encoded, mask, before = padded(rows)
    seen = mask.shape[1]
    new = data.draw(st.integers(1, seen))
    batch = padded_batch(len(rows), encoded[:, -new:], mask)
    covered = [row for segment in batch.segments for row in range(len(rows))[segment.rows]]
    assert covered == list(range(len(rows)))
    for segment in batch.segments:
        for row in range(len(rows))[segment.rows]:
            pad = int(before[row])
            assert (segment.slot, segment.key_column) == (rows[row][0], pad)
            assert segment.query == slice(max(0, pad - (seen - new)), new)
            assert segment.q_start == seen - new + segment.query.start - pad
    column = data.draw(st.integers(seen - new, seen - 1))
    row = data.draw(st.integers(0, len(rows) - 1))
    if mask[row, column] and (new > 1 or mask[row, -1]):
        wrong = encoded.clone()
        wrong[row, column] += 1
        with pytest.raises(ValueError, match="position_ids must count"):
            padded_batch(len(rows), wrong[:, -new:], mask)
    if new > 1:
        wrong = encoded.clone()
        wrong[row, column] += 1 << 24
        with pytest.raises(ValueError, match="the same slot"):
            padded_batch(len(rows), wrong[:, -new:], mask)
