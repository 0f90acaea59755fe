"""Waiting for a condition. Nothing is imported for it: children of tests import the modules of their functions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object], seconds: float = 15) -> None:
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert waited < seconds, "it did not happen"
        time.sleep(min(0.01 + waited / 10, 0.05))  # a look at a server costs it milliseconds


async def until(condition: Callable[[], object], seconds: float = 30) -> None:
    """``wait_for`` beside other work of the event loop."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
