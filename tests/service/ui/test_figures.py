"""Figures of results: Plotly's bar on screens with a pointer that hovers, and on telephones."""

from __future__ import annotations

import httpx
from fastapi import FastAPI

from tests.service.ui.conftest import Visits, playwright

expect = playwright.expect

BODY = {"input": [5, 6, 7] * 40, "lengths": [16, 32, 64], "methods": ["default", "yarn:4"]}
TELEPHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


def test_plotlys_bar_uploads_nothing_and_is_on_no_telephone(visits: Visits, tiny: tuple[str, FastAPI]) -> None:
    url = tiny[0]
    page_of_it = url + httpx.post(f"{url}/perplexity", json=BODY, timeout=60).json()["links"]["html"]
    page = visits.open(page_of_it)
    expect(page.locator(".modebar-btn[data-title^=Download]")).to_have_count(1)
    expect(page.locator(".modebar-btn[data-title^=Share]")).to_have_count(0)
    page = visits.open(page_of_it, visits.context(**TELEPHONE))
    expect(page.locator(".legendtext").first).to_be_visible()
    expect(page.locator(".modebar-btn")).to_have_count(0)
