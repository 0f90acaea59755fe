"""The order of work on the generation thread: tenants in turn, by the time that each has used."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from service.engine.thread.interleave import Interleaved
from service.sharing.turns import Turns

T = TypeVar("T")

PREFILL_BESIDE_OTHERS = 256
"""Most prompt tokens of one step on a CPU while another tenant has work. The other tenants wait for the whole step."""


def candidates(  # noqa: PLR0913 - two queues, and four things that order them
    decoding: Sequence[T],
    reading: Sequence[T],
    tenant_of: Callable[[T], str],
    turns: Turns,
    others: set[str],
    token_budget: int,
    prefill_beside_others: int | None,
) -> tuple[list[T], list[T], int]:
    """(requests that decode in a step, requests whose prompts it may read, tokens of the step).

    Every request decodes in each step, and prompts are read of the tenant that has used the least time. A tenant that
    only decodes takes its turn by a step without prompts. A long prompt of another tenant then costs it at most an
    equal share of the time. ``others`` have work beside generation. Requests of one tenant keep their order.

    ``prefill_beside_others`` is for a CPU, where rows cost time. It limits the prompt tokens of a step of several
    tenants. With it, only tenants with equal use decode in such a step.
    """
    decode = {tenant_of(request) for request in decoding}
    tenants = decode | {tenant_of(request) for request in reading}
    turns.enter(tenants | others)
    turn = turns.least(tenants)
    mine = [request for request in reading if tenant_of(request) == turn]
    if not mine and turn not in decode:
        mine = list(reading)
    if prefill_beside_others is not None and len(tenants | others) > 1:
        level = turns.level(tenants)
        decoding = [request for request in decoding if tenant_of(request) in level]
        token_budget = min(token_budget, len(decoding) + prefill_beside_others)
    if len(decode) > 1:
        decoding = sorted(decoding, key=lambda request: tenant_of(request) != turn)
    return list(decoding), mine, token_budget


def interleave(work: Interleaved, turns: Turns, generating: Callable[[], set[str]]) -> set[str]:
    """One step of long work, if the tenant whose turn it is has some; returns the tenants with such work."""
    tenants = work.tenants()
    if tenants:
        everyone = tenants | generating()
        turns.enter(everyone)
        turn = turns.least(everyone)
        began = time.perf_counter()
        if turn in tenants and work.advance(turn):
            turns.charge(time.perf_counter() - began, [(turn, 1)])
    return tenants
