"""A shared budget: every tenant finds room, none starves, and one tenant keeps its own order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service import context
from service.api.evaluations import alone
from service.context import RequestContext
from service.sharing.admission import Admission, QueueFull, Ticket, TooLarge
from service.sharing.pool import Pool


def enter(admission: Admission, tenant: str, *sizes: int) -> list[Ticket]:
    context.enter(RequestContext("", tenant=tenant))
    return admission.enter(list(sizes))


def granted(tickets: list[Ticket]) -> int:
    return sum(ticket.granted.is_set() for ticket in tickets)


async def test_a_tenant_leaves_room_for_the_next() -> None:
    admission = Admission(capacity=100, max_waiting=5, shared=True)
    many = enter(admission, "anna", *[5] * 64)
    assert granted(many) == 14
    assert granted(enter(admission, "berta", 20)) == 1
    assert admission.most == 75
    with pytest.raises(TooLarge):
        admission.check(76)


async def test_ten_greedy_tenants_leave_room_for_an_eleventh() -> None:
    admission = Admission(capacity=1000, max_waiting=5, shared=True)
    for number in range(10):
        enter(admission, f"tenant {number}", *[5] * 100)
    assert granted(enter(admission, "late", 5)) == 1


async def test_the_queue_of_one_tenant_is_not_anothers() -> None:
    admission = Admission(capacity=10, max_waiting=2, shared=True)
    enter(admission, "anna", 7)
    for _ in range(2):
        enter(admission, "anna", 7)
    with pytest.raises(QueueFull):
        enter(admission, "anna", 1)
    assert granted(enter(admission, "berta", 2)) == 1


async def test_what_waits_for_room_is_overtaken_by_no_more_than_its_size() -> None:
    admission = Admission(capacity=100, max_waiting=99, shared=True)
    enter(admission, "anna", 60)
    (large,) = enter(admission, "berta", 50)
    passed = [ticket for number in range(30) for ticket in enter(admission, f"tenant {number}", 2)]
    assert granted(passed) == 20  # 60 + 40 fill the budget
    for ticket in passed[:20]:
        ticket.leave()
    assert granted(passed) == 25  # 50 have overtaken: from here on the large one is next
    assert not large.granted.is_set()


async def test_a_tenants_own_small_requests_do_not_overtake_its_large_one() -> None:
    admission = Admission(capacity=100, max_waiting=99, shared=True)
    (first,) = enter(admission, "anna", 50)
    (large,) = enter(admission, "anna", 60)
    (small,) = enter(admission, "anna", 1)
    assert not small.granted.is_set()
    first.leave()
    assert large.granted.is_set()
    assert small.granted.is_set()


async def test_the_budgets_of_a_pool_share_its_bytes_and_none_starves() -> None:
    pool, small, large = Pool(1000), Admission(0, 99), Admission(0, 99)
    small.join(pool, 1, 1000)
    large.join(pool, 10, 100)
    (first,), (second,) = enter(small, "anna", 400), enter(small, "berta", 400)
    (waits,) = enter(large, "carla", 90)
    (later,) = enter(small, "dora", 100)
    assert (granted([first, second]), pool.reserved) == (2, 800)
    assert granted([waits, later]) == 0, "the later one fits, and would keep the large one waiting"
    first.leave()
    assert granted([waits, later]) == 0
    second.resize(100)
    assert (granted([waits]), granted([later]), pool.reserved) == (1, 0, 1000)
    second.leave()
    assert (granted([waits, later]), pool.reserved) == (2, 1000)
    waits.leave()
    later.leave()
    assert pool.reserved == small.reserved == large.reserved == 0


async def test_one_that_its_own_budget_has_no_room_for_keeps_no_other_out() -> None:
    pool, full, other = Pool(1000), Admission(0, 99), Admission(0, 99)
    full.join(pool, 1, 10)
    other.join(pool, 1, 10)
    (first,), (waits,) = enter(full, "anna", 10), enter(full, "berta", 5)
    (later,) = enter(other, "carla", 10)
    assert (granted([first, later]), granted([waits])) == (2, 0)


async def test_a_request_waits_for_a_model_with_the_memory_of_no_other() -> None:
    """Two that waited for each other's never ended."""
    pool, one, two = Pool(100), Admission(0, 99), Admission(0, 99)
    one.join(pool, 1, 100)
    two.join(pool, 1, 100)
    (held,), (waits,) = enter(one, "anna", 60), enter(two, "anna", 60)
    tickets = {"one": held, "two": waits}
    assert alone(tickets, "one") is held
    assert (list(tickets), one.reserved) == (["two"], 60)
    tickets["one"] = held
    assert alone(tickets, "two") is waits
    assert (tickets, one.reserved, granted([waits])) == ({}, 0, 1)
    (again,) = enter(one, "anna", 40)
    assert alone({"one": again}, "evaluator") is None
    assert one.reserved == 0


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("enter"), st.tuples(st.integers(0, 3), st.lists(st.integers(1, 30), min_size=1))),
            st.tuples(st.just("leave"), st.integers(0, 50)),
            st.tuples(st.just("resize"), st.tuples(st.integers(0, 50), st.integers(1, 8))),
        ),
        max_size=40,
    ),
    st.booleans(),
)
def test_nobody_is_forgotten(steps: list[tuple[str, Any]], shared: bool) -> None:
    async def run() -> None:
        admission = Admission(capacity=12, max_waiting=3, unit=2, max_waiting_tokens=40, shared=shared)
        tickets: list[Ticket] = []
        for name, value in steps:
            if name == "enter":
                try:
                    tickets += enter(admission, str(value[0]), *value[1])
                except QueueFull:
                    assert admission.waiting
            elif tickets and name == "leave":
                tickets.pop(value % len(tickets)).leave()
            elif tickets:
                at, size = value
                tickets[at % len(tickets)].resize(size)
            assert admission.reserved == sum(t.needed for t in tickets if t.granted.is_set()) <= 12
            assert admission.waiting == sum(not t.granted.is_set() for t in tickets)
        while tickets:
            held = [ticket for ticket in tickets if ticket.granted.is_set()]
            assert held, "all wait and nobody holds anything"
            held[0].leave()
            tickets.remove(held[0])
        assert (admission.reserved, admission.waiting) == (0, 0)

    asyncio.run(run())
