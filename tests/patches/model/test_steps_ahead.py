"""Tables of several decode steps at once: the bits of each step alone, and none that belongs to another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from patches import Patched, Recordings, encode, packed_batch, parse
from patches.encoding.recipe import ResolvedRecipe
from patches.encoding.rotary import rotary_table
from patches.model.rotary_tables import TableFormat
from patches.model.steps_ahead import STEPS, StepsAhead

INV_FREQ = torch.tensor([1.0, 0.31, 0.013])


class Counted:
    """Tables of ``TableFormat``, and the number of steps of each call that made them."""

    def __init__(self, form: TableFormat, planes: int | None = None) -> None:
        self.form, self.planes, self.made = form, planes, list[int]()

    def __call__(self, encoded: torch.Tensor) -> Any:
        self.made.append(len(encoded))
        return self.form.table(encoded[..., None], INV_FREQ, 1.1, torch.float32, self.planes)


@pytest.mark.parametrize("layout", ["half", "interleaved", "pairs", "complex"])
@pytest.mark.parametrize("planes", [None, 3])
def test_each_step_has_the_bits_of_its_own_table(layout: Any, planes: int | None) -> None:
    make, ahead = Counted(TableFormat(layout, by_plane=planes is not None), planes), StepsAhead()
    first = torch.tensor([[7, 4001, 12]])
    for step in range(2 * STEPS + 2):
        found, own = ahead.table(first + step, "kind", make), Counted(make.form, planes)(first + step)
        for one, other in zip(*((each,) if layout == "complex" else each for each in (found, own)), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert make.made == [1, STEPS, STEPS, STEPS]


def test_other_tokens_have_other_tables() -> None:
    """Positions alone count, so a step may be repeated, and requests may come and go."""
    make, ahead = Counted(TableFormat()), StepsAhead()
    steps = [[5, 9], [6, 10], [7, 11], [7, 11], [8, 13], [8], [9], [10, 11], [0, 1, 2], [9, 14], [10, 15], [9, 14]]
    for tokens in steps:
        for kind in ("kind", "other kind"):
            cos, sin = ahead.table(torch.tensor([tokens]), kind, make)
            expected = rotary_table(torch.tensor(tokens)[:, None], INV_FREQ, 1.1, interleaved=False)
            assert torch.equal(cos[0], expected[0])
            assert torch.equal(sin[0], expected[1])


def tables(patch: Patched, position: int, slot: int) -> Any:
    """The rotary tables of a decode step, as a recorded forward asks for them."""
    patch.slots.upload()
    position_ids = torch.tensor([[position]])
    encoded = encode(position_ids, slot)
    with (
        patch.packed(packed_batch([(slot, position, 1)]), {}, Recordings(pytest.fail)),
        patch._forwards.opened(encoded, None),
    ):
        return patch.rotary(torch.zeros(1), position_ids)


@torch.inference_mode()
def test_a_slot_that_gets_another_encoding_has_its_tables(patch: Patched) -> None:
    first, second = (patch.resolve(parse(name), 256) for name in ("linear:4", "yarn:4"))
    slot = patch.slots.acquire(first)
    for position in (20, 21, 22):
        assert torch.equal(tables(patch, position, slot)[0][0], cosines(first, position))
    patch.slots.put(slot, second)
    assert torch.equal(tables(patch, 23, slot)[0][0], cosines(second, 23))
    patch.slots.release(slot)


def cosines(resolved: ResolvedRecipe, position: int) -> torch.Tensor:
    moved, inv_freq = resolved.recipe.base(torch.tensor([position])), torch.tensor(resolved.inv_freq)
    return rotary_table(moved[:, None], inv_freq, resolved.attention_factor, interleaved=False)[0]
