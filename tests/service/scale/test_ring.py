"""The ring: keys keep their replica, loads stay within the bound."""

from __future__ import annotations

from collections import Counter

import pytest

from service.scale.proxy.ring import SPARE, Ring

NAMES = [f"replica-{number}" for number in range(8)]
KEYS = [f"key-{number}" for number in range(2000)]
IDLE = dict.fromkeys(NAMES, 0)


def owner(ring: Ring, key: str) -> str:
    return next(ring.order(key))


def test_each_replica_appears_once_in_the_order_of_a_key() -> None:
    ring = Ring(NAMES)
    assert all(sorted(ring.order(key)) == NAMES for key in KEYS[:50])
    assert len({tuple(ring.order(key)) for key in KEYS[:50]}) > 40


def test_keys_are_shared_about_evenly() -> None:
    ring = Ring(NAMES)
    counts = Counter(owner(ring, key) for key in KEYS)
    assert set(counts) == set(NAMES)
    assert max(counts.values()) < 1.6 * len(KEYS) / len(NAMES)


@pytest.mark.parametrize("gone", NAMES[:3])
def test_only_the_keys_of_a_lost_replica_move(gone: str) -> None:
    before, after = Ring(NAMES), Ring([name for name in NAMES if name != gone])
    moved = [key for key in KEYS if owner(before, key) != owner(after, key)]
    assert moved
    assert {owner(before, key) for key in moved} == {gone}


def test_idle_replicas_keep_their_keys() -> None:
    ring = Ring(NAMES)
    assert all(ring.choose(key, IDLE, 1.25)[0] == owner(ring, key) for key in KEYS[:100])


def test_a_busy_replica_passes_its_keys_on() -> None:
    ring = Ring(NAMES)
    for key in KEYS[:100]:
        first, second, *_ = ring.order(key)
        assert ring.choose(key, IDLE | {first: SPARE + 5}, 1.25)[0] == second


def test_one_popular_key_never_exceeds_the_bound() -> None:
    ring, loads = Ring(NAMES), dict(IDLE)
    for sent in range(800):
        loads[ring.choose("popular", loads, 1.25)[0]] += 1
        assert max(loads.values()) <= 1.25 * sent / len(NAMES) + SPARE + 1


def test_the_least_loaded_follow_and_a_replica_off_the_ring_is_no_failure() -> None:
    loads = IDLE | {"replica-3": -1}
    assert "replica-3" in Ring(NAMES).choose("key", loads, 1.25)
    assert Ring(NAMES).choose("key", {"new": 4}, 1.25) == ["new"]
