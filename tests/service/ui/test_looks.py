"""Every part of the page, light and dark, wide and narrow: nothing overflows, axe-core finds nothing serious."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.service.serving import wait_for
from tests.service.ui.conftest import Visits, playwright

pytestmark = pytest.mark.slow
expect = playwright.expect

AXE = "axe-core@4"
WIDE, NARROW = {"width": 1920, "height": 1080}, {"width": 375, "height": 812}
LOOKS = (("wide", WIDE, "light"), ("narrow", NARROW, "dark"))
EVERY_LOOK = (*LOOKS, ("wide", WIDE, "dark"), ("narrow", NARROW, "light"))
"""With ``--screenshots``."""


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script of axe-core, from npm: it is MPL-2.0, and no part of this project."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm: axe-core comes from it")
    folder = tmp_path_factory.mktemp("axe")
    command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(folder), AXE]
    try:
        installed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)
    except subprocess.TimeoutExpired:
        pytest.skip("npm does not answer: axe-core comes from it")
    if installed.returncode:
        pytest.skip(f"npm cannot install axe-core: {installed.stderr[-200:]}")
    return (folder / "node_modules/axe-core/axe.min.js").read_text()


def generate(page: playwright.Page) -> None:
    page.get_by_role("button", name="A passkey beyond the trained length").click()
    expect(page.get_by_text("times the trained length")).to_be_visible()
    page.get_by_role("button", name="Generate").click()
    expect(page.locator(".answer[data-state=done]")).to_have_count(4)
    page.get_by_text("Encoding in effect").first.click()
    page.locator(".text").nth(1).locator("span").nth(6).hover()
    expect(page.locator(".alternatives")).to_be_visible()


def encodings(page: playwright.Page) -> None:
    page.get_by_role("combobox", name="Compared with").select_option("self_extend")
    expect(page.locator(".figures h3").nth(1)).to_contain_text("self_extend")
    expect(page.locator(".figures .main-svg").last).to_be_visible()


def reach(page: playwright.Page) -> None:
    page.get_by_label("Encodings").fill("default self_extend")
    page.get_by_label("Target length, tokens").fill("256")
    page.get_by_role("button", name="Measure").click()
    expect(page.locator(".job[data-state=done]")).to_have_count(3, timeout=120_000)
    expect(page.locator(".job .main-svg").last).to_be_visible()


def use(page: playwright.Page) -> None:
    expect(page.locator(".card")).to_have_count(10)


def jobs(page: playwright.Page) -> None:
    row = page.get_by_role("row").filter(has_text="perplexity").filter(has_text="done")
    row.get_by_role("button", name="Open").first.click()
    expect(page.locator(".job[data-state=done] .main-svg").first).to_be_visible()
    switches = page.get_by_role("button", name=re.compile("^Compare perplexity"))
    for place in (1, 2):
        switches.nth(switches.count() - place).click()
    expect(page.locator(".comparison .main-svg").last).to_be_visible()


PARTS: dict[str, Callable[[playwright.Page], None]] = {
    "generate": generate, "encodings": encodings, "reach": reach, "use": use, "jobs": jobs,
}  # fmt: skip


def is_done(job: str) -> bool:
    state: str = httpx.get(job).json()["state"]
    return state == "done"


@pytest.fixture(scope="module")
def finished(small: tuple[str, FastAPI]) -> str:
    """Address of the server, which has two finished jobs."""
    url, _ = small
    body = {"evaluation": "perplexity", "methods": ["default", "yarn:4"], "lengths": [256, 512], "max_tokens": 1024}
    for _ in range(2):
        job = httpx.post(f"{url}/jobs", json=body, timeout=60).json()["id"]
        wait_for(partial(is_done, f"{url}/jobs/{job}"), 60)
    return url


@pytest.mark.parametrize("part", PARTS)
def test_a_part_looks_right_and_is_accessible(
    part: str, finished: str, visits: Visits, axe: str, screenshots: Path | None
) -> None:
    page = visits.open(f"{finished}/ui/#{part}", viewport=WIDE)
    expect(page.get_by_role("navigation")).to_be_visible()
    PARTS[part](page)
    page.evaluate(axe)
    for size, viewport, theme in LOOKS if screenshots is None else EVERY_LOOK:
        page.set_viewport_size(viewport)
        page.get_by_label("Theme").select_option(theme)
        page.wait_for_timeout(700)  # figures are drawn again
        overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert overflow <= 0, f"{size}: the page scrolls sideways"
        if screenshots is not None:
            screenshots.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=screenshots / f"{part}-{size}-{theme}.png", full_page=True)
        assert serious(page) == [], (size, theme)


def serious(page: playwright.Page) -> list[str]:
    """Serious and critical findings of axe-core, which the page has loaded."""
    rules = "{resultTypes: ['violations']}"
    found: list[dict[str, Any]] = page.evaluate(f"axe.run(document, {rules}).then(result => result.violations)")
    return [
        f"{one['id']}: {node['target']} {node['failureSummary']}"
        for one in found
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_what_is_of_other_settings_is_readable(theme: str, finished: str, visits: Visits, axe: str) -> None:
    page = visits.open(f"{finished}/ui/#generate?max_new_tokens=12&temperature=1.2", viewport=WIDE)
    page.get_by_label("Theme").select_option(theme)
    page.get_by_role("button", name="Generate").click()
    expect(page.locator(".answer[data-state=done]")).to_have_count(4)
    page.get_by_label("Prompt", exact=True).fill("Another prompt")
    expect(page.locator(".stale .answer").first).to_have_css("border-style", "dashed")
    page.evaluate(axe)
    assert serious(page) == []
    page.get_by_role("link", name="Encodings").click()
    expect(page.locator(".figures .main-svg").last).to_be_visible()
    page.get_by_role("textbox", name="factor", exact=True).fill("0.5")
    expect(page.locator(".stale .figures")).to_have_css("outline-style", "dashed")
    assert serious(page) == []


def test_an_open_page_asks_nothing(finished: str, visits: Visits) -> None:
    page = visits.open(f"{finished}/ui/")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for part in PARTS:
        page.goto(f"{finished}/ui/#{part}")
        expect(page.locator("main")).not_to_be_empty()
    for _ in range(10):
        asked.clear()
        page.wait_for_timeout(4000)
        if not asked:
            return
    raise AssertionError(f"it asks for ever: {asked}")
