"""Keys that turn once, and the places that they stay in."""

from __future__ import annotations

import pytest
import torch

from patches import parse, resolve
from patches.attention.decode.reading import reading_of
from patches.attention.decode.sums.rings import LEAST_SIZE, Ring, Rings, Turning
from patches.attention.decode.tables import ROTATIONS, moved, rotation, rotations
from patches.attention.layer import Layer
from patches.attention.positions import SegmentPositions
from patches.encoding.bands import IDENTITY
from patches.encoding.recipe import ResolvedRecipe
from tests.patches.attention.decode.test_single_query import GEOMETRY


def extended(window: int = 20, group: int = 4) -> ResolvedRecipe:
    fields = {"method": "self_extend", "group_size": group, "neighbor_window": window}
    return resolve(parse(fields), GEOMETRY, 300)


RESOLVED = extended()


def turning(first: int, stop: int, resolved: ResolvedRecipe = RESOLVED) -> Turning:
    return Turning(resolved.recipe.bands[0], resolved, range(first, stop))


def test_a_step_turns_its_new_key() -> None:
    ring = Ring(0, 64, RESOLVED)
    assert ring.missing(range(10, 30)) == range(10, 30)
    ring.add(range(10, 30))
    for stop in range(31, 200):
        assert ring.missing(range(stop - 20, stop)) == range(stop - 1, stop)
        ring.add(range(stop - 20, stop))
        assert len(ring.known) <= ring.size
    assert ring.missing(range(180, 201)) == range(199, 201), "a step in between had other calls"
    ring.add(range(180, 201))
    assert ring.missing(range(180, 201)) == range(200, 201), "a step that is repeated turns its key again"
    assert ring.missing(range(170, 190)) == range(189, 190), "one that goes back, too"
    ring.add(range(170, 190))
    assert ring.missing(range(171, 201)) == range(190, 201)
    assert ring.missing(range(201, 221)) == range(201, 221), "a key is missing between those"
    assert ring.missing(range(20, 221)) == range(20, 221), "the first ones are overwritten"


def test_a_ring_has_each_position_at_one_place() -> None:
    ring = Ring(100, 64, RESOLVED)
    places = ring.places(range(50, 114)).tolist()
    assert sorted(places) == list(range(100, 164))
    assert ring.places(range(113, 115)).tolist() == [149, 150]


def test_rings_divide_the_places() -> None:
    rings = Rings(range(1000, 1000 + 4 * LEAST_SIZE))
    small = rings.ring("a", turning(0, 20), 7)
    large = rings.ring("b", turning(0, LEAST_SIZE), 1)
    assert small is not None
    assert large is not None
    assert (small.first, small.size) == (1000, LEAST_SIZE)
    assert (large.first, large.size) == (1000 + LEAST_SIZE, 2 * LEAST_SIZE)
    assert rings.free == range(1000 + 3 * LEAST_SIZE, 1000 + 4 * LEAST_SIZE)
    assert rings.ring("a", turning(40, 60), 7) is small
    assert rings.ring("c", turning(0, LEAST_SIZE), 1) is None, "too few places in a row"
    other = rings.ring("e", turning(0, 3), 0)
    assert other is not None
    assert other.first == 1000 + 3 * LEAST_SIZE
    assert len(rings.free) == 0
    rings.keep(["b", "e"])
    again = rings.ring("d", turning(0, 3), 0)
    assert again is not None
    assert again.first == 1000, "the first gap that is large enough"
    assert rings.ring("e", turning(0, 3), 0) is other


def test_each_band_has_a_ring() -> None:
    """Whichever parts a reading has: a band is its first part until another reaches a key."""
    rings, (near, far) = Rings(range(1024)), RESOLVED.recipe.bands
    first, second = (rings.ring("a", Turning(band, RESOLVED, range(9)), 0) for band in (near, far))
    assert first is not second
    assert rings.ring("a", Turning(near, RESOLVED, range(9)), 0) is first


def test_another_encoding_has_another_ring() -> None:
    """A request that is cancelled takes the model's own slot for its last step."""
    rings = Rings(range(1024))
    ring = rings.ring("a", turning(0, 20), 0)
    assert ring is not None
    ring.add(range(20))
    same = rings.ring("a", turning(1, 21, extended()), 0)
    assert same is ring
    other = rings.ring("a", turning(1, 21, extended(group=3)), 0)
    assert other is not None
    assert other.known == range(0)
    assert rings.ring("a", turning(1, 21), 0) is not ring


@pytest.mark.parametrize("stop", [5, ROTATIONS, 3 * ROTATIONS + 2])
def test_rotations_are_those_of_the_moves(stop: int) -> None:
    with torch.inference_mode():
        for positions in (range(stop), range(stop - 1, stop)):
            by = moved(IDENTITY, RESOLVED.recipe.base, torch.arange(positions.start, positions.stop))
            expected = rotation(by, RESOLVED.turns, RESOLVED.interleaved)
            found = rotations(IDENTITY, RESOLVED, positions)
            assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("length", [12, 20, 21, 90])
def test_the_query_turns_for_keys_that_turn_once(length: int) -> None:
    """Then their turn depends on nothing but their position."""
    with torch.inference_mode():
        found = [
            reading_of(
                SegmentPositions(RESOLVED, Layer(0.3), range(q, q + 1), q + 1, 0, torch.float32, torch.device("cpu")),
                True,
            )
            for q in (length - 1, length)
        ]
    near = [next(part for part in reading.parts if part.once is not None) for reading in found]
    assert all(part.once is not None and part.query is not None for part in near)
    first, second = (dict(zip(part.once.positions, part.keys[0][1][0], strict=True)) for part in near if part.once)
    assert len(first) == min(20, length)
    assert all(torch.equal(cos, second[position]) for position, cos in first.items() if position in second)
    assert found[1].follows(found[0], length + 1) == (length != 20), "the far band has its first key"
