"""Speed of the page: the first load, and its delay of a stream against the API alone, in turns."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.service.ui.conftest import Visits, playwright

pytestmark = pytest.mark.slow
expect = playwright.expect

ROUNDS, TOKENS = 2, 48
FIRST_LOAD_S, FIRST_LOAD_BYTES = 2.0, 3_000_000
MOST_ADDED_S = 0.05
"""By the requirements of the page."""

WATCH = """() => {
  window.arrived = [];
  let seen = 0;
  new MutationObserver(() => {
    const words = document.querySelectorAll(".answer .text")[0]?.querySelectorAll("[data-word]").length ?? 0;
    for (; seen < words; seen++) window.arrived.push(performance.now() / 1000);
  }).observe(document.body, { childList: true, subtree: true });
}"""
"""Records when each word of the first answer is in the page."""


def gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


def api_alone(url: str, body: dict[str, Any]) -> list[float]:
    """Arrivals of the first answer's tokens."""
    times = []
    with httpx.stream("POST", f"{url}/generate", json=body | {"stream": True, "logprobs": 5}, timeout=60) as answer:
        times = [time.perf_counter() for line in answer.iter_lines() if line.startswith('data: {"index":0,"text"')]
    return times


def test_streaming_through_the_page_adds_little(small: tuple[str, FastAPI], visits: Visits) -> None:
    url, _ = small
    body = {"prompt": "She was", "pe": ["default", "yarn:4"], "max_new_tokens": TOKENS}
    address = f"{url}/ui/#generate?prompt=She+was&pe[]=default&pe[]=yarn:4&max_new_tokens={TOKENS}"
    alone, through = [], []
    for _ in range(ROUNDS):
        alone += gaps(api_alone(url, body))
        page = visits.open(address)
        page.get_by_role("button", name="Generate").wait_for()
        page.evaluate(WATCH)
        page.get_by_role("button", name="Generate").click()
        expect(page.locator(".answer[data-state=done]")).to_have_count(2)
        arrived = page.evaluate("window.arrived")
        assert len(arrived) == TOKENS
        through += gaps(arrived)
    assert statistics.mean(through) - statistics.mean(alone) < MOST_ADDED_S
    assert statistics.median(through) - statistics.median(alone) < MOST_ADDED_S


def test_the_first_load(small: tuple[str, FastAPI], visits: Visits) -> None:
    """The faster of two, each in a browser without a cache: other tests take the processor too."""
    seconds, sizes = [], []
    for _ in range(ROUNDS):
        context = visits.context()
        began = time.perf_counter()
        page = visits.open(small[0], context)
        expect(page.get_by_role("button", name="Generate")).to_be_visible()
        seconds.append(time.perf_counter() - began)
        entries = "performance.getEntries().reduce((sum, entry) => sum + (entry.transferSize ?? 0), 0)"
        sizes.append(page.evaluate(entries))
    assert min(seconds) < FIRST_LOAD_S
    assert 1000 < max(sizes) < FIRST_LOAD_BYTES
