"""Sums of several steps from one plan, against the reference in each step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from patches import parse, resolve
from patches.attention import reference
from patches.attention.decode.plan import STEPS, Decoding, Plan, Row
from patches.attention.decode.reading import ORDINARY, Reading, reading_of
from patches.attention.decode.shared import SharedCalls
from patches.attention.decode.sums.columns import Member
from patches.attention.decode.sums.ragged import RaggedBatch, ragged_attention, ragged_batch
from patches.attention.decode.sums.rings import Rings
from patches.attention.layer import Layer
from patches.attention.positions import SegmentPositions
from patches.batch.segments import packed_batch
from patches.encoding.recipe import ResolvedRecipe
from patches.model.attention.in_place import LayerInPlace
from tests.methods import Fields
from tests.patches.attention.decode.test_single_query import GEOMETRY
from tests.patches.attention.decode.test_strided import MORE
from tests.patches.forward import relative

LENGTHS, PLACES, SPARE = [60, 17, 90], [range(200, 400), range(0, 100), range(500, 700)], range(800, 2000)


def readings_of(resolved: ResolvedRecipe, length: int) -> list[Reading]:
    """The readings of a query and of those behind it, as far as they are alike."""
    found: list[Reading] = []
    for step in range(STEPS):
        query, layer = range(length + step - 1, length + step), Layer(0.3)
        positions = SegmentPositions(resolved, layer, query, length + step, 0, torch.float32, torch.device("cpu"))
        reading = reading_of(positions, True)
        if found and not reading.follows(found[-1], length + step):
            break
        found.append(reading)
    return found


def member(rings: Rings, number: int, length: int, readings: list[Reading]) -> Member:
    once = enumerate(part.once for part in readings[0].parts)
    own = {part: rings.ring(number, turning, len(readings) - 1) for part, turning in once if turning is not None}
    found = {part: ring for part, ring in own.items() if ring is not None}
    assert found == own, "there are places for all rings"
    return Member(number, readings[0], length, [PLACES[number]], found, readings[1:])


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("rotary", [{}, {"interleaved": True}, {"rotary_dim": 8, "rotary_offset": 8}], ids=str)
@pytest.mark.parametrize("fields", MORE, ids=str)
def test_every_step_has_the_output_of_the_reference(fields: Fields, rotary: dict[str, Any], kv_heads: int) -> None:
    """Plans follow one another, and keys of later steps are not there yet."""
    generator, geometry = torch.Generator().manual_seed(0), replace(GEOMETRY, **rotary)
    keys, values = torch.randn(2, kv_heads, SPARE.stop, 16, generator=generator).mul(2)
    later, rings, lengths, heads, used = keys.clone(), Rings(SPARE), list(LENGTHS), 4, []
    methods: list[Fields] = [fields, {"method": "default"}, {"method": "alibi"}]
    recipes = [resolve(parse(each), geometry, 300) for each in methods]
    for place, length in zip(PLACES, LENGTHS, strict=True):
        keys[:, place.start + length : place.stop] = 3.0
    with torch.inference_mode():
        while len(used) < 3:
            each = [readings_of(recipe, length) for recipe, length in zip(recipes, lengths, strict=True)]
            steps = min(map(len, each))
            own = zip(lengths, each, strict=True)
            members = [member(rings, number, *(length, found[:steps])) for number, (length, found) in enumerate(own)]
            batch = ragged_batch(members, 3, heads, keys, rings.free.start)
            used.append(steps)
            for step in range(steps):
                if step:
                    batch.begin(step)
                for place, length in zip(PLACES, lengths, strict=True):
                    keys[:, place.start + length - 1] = later[:, place.start + length - 1]
                query = torch.randn(1, heads, 3, 16, generator=generator)
                out = ragged_attention(query, keys, values, 0.3, batch)
                for number, (place, length) in enumerate(zip(PLACES, lengths, strict=True)):
                    seen = (states[None, :, place.start : place.start + length] for states in (later, values))
                    alone = query[:, :, number : number + 1], *seen, recipes[number], Layer(0.3)
                    assert relative(out[:, number, :, None], reference.attend(*alone, q_start=length - 1)) < 1e-5
                lengths = [length + 1 for length in lengths]
    assert max(used) > 1


def steps_of(
    q_start: int, *, names: tuple[str, str] = ("a", "b"), slot: int = 0, last: range = range(64), first: int = 300
) -> Row:
    places = [[range(first, 308), last], [range(100, 164)]]
    batch = packed_batch([(slot, q_start, 1), (3, q_start, 1)], places, names)
    return Row(batch, [1, 1], [q_start + 1] * 2)


def plan_of(steps: int) -> tuple[Plan, RaggedBatch]:
    members = [Member(n, ORDINARY, 21, [range(100 * n, 100 * n + 64)], {}, [ORDINARY] * (steps - 1)) for n in (0, 1)]
    batch = ragged_batch(members, 2, 2, torch.zeros(2, 200, 16))
    shared = SharedCalls(batch, [])
    return Plan(shared, [], None, shared.ahead), batch


def test_a_plan_goes_on_until_its_last_step() -> None:
    plan, batch = plan_of(4)
    decoding = Decoding()
    decoding.keep(plan, steps_of(20))
    for step in (1, 2, 3):
        more = steps_of(20 + step, last=range(64 + step))
        assert decoding.goes_on(more), "more places behind a key are as good"
        assert decoding.plan is plan
        assert decoding.row is more
        assert batch.step == step
    assert not decoding.goes_on(steps_of(24))


@pytest.mark.parametrize(
    "changes",
    [
        {"q_start": 20},
        {"q_start": 22},
        {"q_start": 21, "names": ("b", "a")},
        {"q_start": 21, "names": ("a", "c")},
        {"q_start": 21, "slot": 1},
        {"q_start": 21, "last": range(32, 96)},
        {"q_start": 21, "first": 301},
        {"q_start": 21, "last": range(15)},
    ],
    ids=str,
)
def test_a_plan_is_for_the_same_sequences_in_the_same_places(changes: dict[str, Any]) -> None:
    plan, _ = plan_of(4)
    decoding = Decoding()
    decoding.keep(plan, steps_of(20))
    assert not decoding.goes_on(steps_of(**changes))
    assert decoding.plan is None
    assert not decoding.goes_on(steps_of(21)), "nothing is kept"


def test_a_layer_goes_on_once_another_of_its_kind_has_begun_the_step() -> None:
    plan, _ = plan_of(4)
    layer, decoding, row, later = Layer(0.3), Decoding(), steps_of(20), steps_of(21)
    decoding.keep(plan, row)
    kept = LayerInPlace(layer, (torch.empty(0), torch.empty(0)), decoding, lambda *_: torch.empty(0))
    assert kept.has_begun(layer, row.batch)
    assert not kept.has_begun(Layer(0.3), row.batch), "another call of the model"
    assert not kept.has_begun(layer, later.batch)
    assert decoding.goes_on(later)
    assert kept.has_begun(layer, later.batch)
    assert not decoding.goes_on(row)
    assert not kept.has_begun(layer, later.batch)


def test_batches_without_places_or_with_other_calls_have_one_step() -> None:
    plan, batch = plan_of(4)
    assert plan.shared.ahead == 3
    assert SharedCalls(None, []).ahead == 0
    assert SharedCalls(batch, [None]).ahead == 0  # type: ignore[list-item]
    copied = packed_batch([(0, 21, 1), (3, 21, 1)], None, ("a", "b"))
    assert not copied.follows(steps_of(20).batch)
    assert not steps_of(22).batch.follows(copied)
