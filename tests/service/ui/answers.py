"""The parts of the page for one model, and the answers of Generate."""

from __future__ import annotations

from tests.service.ui.conftest import playwright

expect = playwright.expect

PARTS = ("generate", "encodings", "reach", "use")
"""Those that are for one model."""


def answers(page: playwright.Page) -> playwright.Locator:
    return page.get_by_role("article")


def texts(page: playwright.Page) -> list[str]:
    """The text of every answer as it is in the page, white space included; marks are no text."""
    script = (
        "texts => texts.map(one => [...one.querySelectorAll('[data-word]')].map(word => word.textContent).join(''))"
    )
    found: list[str] = page.locator(".answer .text").evaluate_all(script)
    return found


def all_done(page: playwright.Page, count: int) -> None:
    expect(page.locator(".answer[data-state=done]")).to_have_count(count)
