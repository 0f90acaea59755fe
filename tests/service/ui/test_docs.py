"""The page of the API's documentation: Swagger UI expands the schemas of an operation when it is opened."""

from __future__ import annotations

from fastapi import FastAPI

from tests.service.ui.conftest import Visits, playwright
from tests.service.ui.proxy import proxied

expect = playwright.expect

MOST_ELEMENTS = 5000
"""Of one open operation; sweep has 2,600. With the schemas of all methods there were so many that it took minutes."""


def test_operations_open_at_once(visits: Visits, tiny: tuple[str, FastAPI]) -> None:
    page = visits.open(f"{tiny[0]}/docs")
    expect(page.locator("html")).to_have_attribute("lang", "en")
    for path in ("/generate", "/sweep"):
        operation = page.locator(".opblock-post", has=page.locator(f'[data-path="{path}"]'))
        expect(operation).to_be_visible()
        operation.locator(".opblock-summary-control").click()
        expect(operation.locator(".responses-wrapper")).to_be_visible()
        assert operation.locator("*").count() < MOST_ELEMENTS, path


def test_requests_of_the_page_go_behind_the_prefix_of_a_proxy(visits: Visits, tiny: tuple[str, FastAPI]) -> None:
    with proxied(tiny[0], "/a/prefix") as proxy:
        page = visits.open(f"{proxy.url}/docs")
        operation = page.locator(".opblock-get", has=page.locator('[data-path="/health"]'))
        operation.locator(".opblock-summary-control").click()
        operation.get_by_role("button", name="Try it out").click()
        operation.get_by_role("button", name="Execute").click()
        expect(operation.locator(".request-url pre")).to_have_text(f"{proxy.url}/health")
        expect(operation.locator(".live-responses-table tr.response .response-col_status")).to_contain_text("200")
