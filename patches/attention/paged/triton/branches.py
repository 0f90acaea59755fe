"""Launches side by side: in a captured graph they are branches, which a card computes at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch


def side_by_side(launches: Sequence[Callable[[], None]], device: torch.device) -> None:
    """Run ``launches``, which neither allocate memory nor read from each other, in branches of a graph.

    Outside of a capture they follow each other: events between streams would take the host longer than they save.
    """
    first, *others = launches
    if not others or device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        for launch in launches:
            launch()
        return
    trunk = torch.cuda.current_stream(device)
    fork, ends = trunk.record_event(), []
    for number, launch in enumerate(others):
        branch = _branch(device, number)
        branch.wait_event(fork)
        with torch.cuda.stream(branch):
            launch()
        ends.append(branch.record_event())
    first()
    for end in ends:
        trunk.wait_event(end)


@cache
def _branch(device: torch.device, number: int) -> torch.cuda.Stream:
    """A stream for captures alone, which are one at a time. Other work in it would end them with an error.

    torch has few streams of a priority and hands them out again. Nothing else asks for this priority.
    """
    return torch.cuda.Stream(device, priority=-1)
