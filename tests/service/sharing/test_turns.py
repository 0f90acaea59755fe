"""The least served tenant is next, and idling earns nothing."""

from __future__ import annotations

from service.sharing.turns import Turns


def test_tenants_use_equal_time_however_long_their_steps_are() -> None:
    turns, used = Turns(), {"anna": 0.0, "berta": 0.0}
    seconds = {"anna": 0.06, "berta": 0.005}
    for _ in range(1000):
        turns.enter(used)
        tenant = turns.least(used)
        assert tenant is not None
        turns.charge(seconds[tenant], [(tenant, 1)])
        used[tenant] += seconds[tenant]
    assert abs(used["anna"] - used["berta"]) <= 0.06 + 1e-9


def test_a_tenant_that_was_idle_is_next_and_no_more() -> None:
    turns = Turns()
    for _ in range(100):
        turns.enter(["anna"])
        turns.charge(1.0, [("anna", 1)])
    turns.enter(["anna", "berta"])
    order = []
    for _ in range(4):
        tenant = turns.least(["anna", "berta"])
        assert tenant is not None
        turns.charge(1.0, [(tenant, 1)])
        order.append(tenant)
    assert sorted(order[:2]) == sorted(order[2:]) == ["anna", "berta"]


def test_who_was_alone_owes_nothing_to_who_comes() -> None:
    turns = Turns()
    for _ in range(100):
        turns.enter(["anna"])
        turns.charge(1.0, [("anna", 1)])
    turns.enter(["berta"])
    turns.charge(0.5, [("berta", 1)])
    turns.enter(["anna", "berta"])
    assert turns.least(["anna", "berta"]) == "anna"


def test_a_step_is_divided_by_tokens() -> None:
    turns = Turns()
    turns.enter(["anna", "berta"])
    turns.charge(1.0, [("anna", 3), ("berta", 1)])
    turns.charge(0.4, [("berta", 1)])
    assert turns.least(["anna", "berta"]) == "berta"
    turns.charge(0.2, [("berta", 1)])
    assert turns.least(["anna", "berta"]) == "anna"
    assert turns.least([]) is None


def test_a_debt_outlives_a_pause() -> None:
    turns = Turns()
    turns.enter(["anna", "berta"])
    turns.charge(10.0, [("anna", 1)])
    turns.enter(["berta"])
    turns.charge(1.0, [("berta", 1)])
    turns.enter(["anna", "berta"])
    assert turns.least(["anna", "berta"]) == "berta"
