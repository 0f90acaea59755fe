"""The page in the machine's own Chromium, on the demo models and on the tiny ones."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from fastapi import FastAPI

from tests.service.demo import small_demo
from tests.service.serving import serving

try:
    from playwright import sync_api as playwright
except ImportError:  # the tests without a browser run all the same
    playwright = SimpleNamespace(expect=None)

USUAL = {"width": 1280, "height": 900}
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
SECONDS = 30
"""The demo models write slowly where other tests take the processor."""


def chromium() -> str | None:
    """The program of the browser: ``CHROMIUM`` in the environment, or one on the path."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="package")
def browser() -> Iterator[playwright.Browser]:
    """Chromium, until a worker leaves this folder: Playwright holds the event loop of the thread until then."""
    if playwright.expect is None:
        pytest.skip("no playwright: pip install playwright")
    program = chromium()
    if program is None:
        pytest.skip(f"no browser: install Debian's package chromium-headless-shell (looked for {', '.join(NAMES)})")
    playwright.expect.set_options(timeout=SECONDS * 1000)
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


LIMITS = {"cache_tokens": 8192, "score_tokens": 8192, "max_batch_tokens": 512, "score_chunk": 256}


@pytest.fixture(scope="package")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, FastAPI]]:
    """(base URL, application) of a server of the demo models."""
    with serving(tmp_path_factory.mktemp("demo"), model="demo", **LIMITS) as served:
        yield served


@pytest.fixture(scope="package")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, FastAPI]]:
    """(base URL, application) of a server of the demo models with one layer."""
    folder = tmp_path_factory.mktemp("small")
    with serving(folder, model=str(small_demo(folder)), **LIMITS) as served:
        yield served


@pytest.fixture(scope="package")
def tiny(checkpoints: Path) -> Iterator[tuple[str, FastAPI]]:
    """(base URL, application) of a server of the tiny models, which has no jobs."""
    with serving(checkpoints) as served:
        yield served


class Visits:
    """Opens pages and collects what they must not do: errors on the console, requests to other hosts.

    It takes pages from ``left`` first, and leaves its own there: Chromium compiles Plotly once for each page.
    """

    def __init__(self, browser: playwright.Browser, left: list[playwright.Page]) -> None:
        self._browser, self._left, self._stack = browser, left, ExitStack()
        self._lent: list[playwright.Page] = []
        self._opened: list[playwright.Page] = []
        self.faults: list[str] = []

    def open(
        self, url: str, context: playwright.BrowserContext | None = None, viewport: dict[str, int] = USUAL
    ) -> playwright.Page:
        """The page at ``url``, in a browser without a past unless ``context`` is given."""
        page = self._own(viewport) if context is None else context.new_page()
        host = urlsplit(url).netloc
        for event, listener in self._listeners(host).items():
            page.on(event, listener)
            self._stack.callback(page.remove_listener, event, listener)
        self._opened.append(page)
        page.goto(url)
        return page

    def _own(self, viewport: dict[str, int]) -> playwright.Page:
        page = self._left.pop() if self._left else self._new_context().new_page()
        page.set_viewport_size(viewport)
        self._lent.append(page)
        return page

    def context(self, **options: object) -> playwright.BrowserContext:
        context = self._new_context(**options)
        self._stack.callback(context.close)
        return context

    def _new_context(self, **options: object) -> playwright.BrowserContext:
        context = self._browser.new_context(**{"viewport": USUAL, "reduced_motion": "reduce"} | options)
        context.set_default_timeout(SECONDS * 1000)
        return context

    def _listeners(self, host: str) -> dict[str, Callable[..., None]]:
        return {
            "pageerror": lambda error: self.faults.append(f"error: {error}"),
            "console": self._heard,
            "request": lambda request: self._asked(request.url, host),
        }

    def _heard(self, message: playwright.ConsoleMessage) -> None:
        refused = "Failed to load resource" in message.text  # Chromium's own line about every answer from 400 on
        if message.type in ("error", "warning") and not refused:
            self.faults.append(f"console: {message.text}")

    def _asked(self, url: str, host: str) -> None:
        if urlsplit(url).scheme not in ("data", "blob") and urlsplit(url).netloc != host:
            self.faults.append(f"request: {url}")

    def seen(self) -> str:
        """The addresses of the pages and their contents, as a screen reader has them."""
        still = [page for page in self._opened if not page.is_closed()]
        return "\n".join(f"{page.url}\n{page.locator('body').aria_snapshot(timeout=2000)}" for page in still)

    def close(self) -> None:
        for page in self._lent:
            self._left.append(emptied(page))
        self._stack.close()
        assert self.faults == []


def emptied(page: playwright.Page) -> playwright.Page:
    """``page`` at an empty document, without cookies, routes and what its last address stored."""
    address = urlsplit(page.url)
    blank = f"{address.scheme}://{address.netloc}/blank"
    page.route(blank, lambda route: route.fulfill(content_type="text/html", body=""))
    page.goto(blank)
    page.evaluate("localStorage.clear(); sessionStorage.clear()")
    page.unroute_all()
    page.context.clear_cookies()
    page.mouse.move(0, 0)
    return page


@pytest.fixture(scope="package")
def left(browser: playwright.Browser) -> list[playwright.Page]:
    """Pages that earlier tests have emptied."""
    return []


@pytest.fixture
def visits(browser: playwright.Browser, left: list[playwright.Page]) -> Iterator[Visits]:
    visits = Visits(browser, left)
    yield visits
    visits.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows its pages: a click that waited says no more than its target."""
    report = yield
    visits = getattr(item, "funcargs", {}).get("visits")
    if report.when == "call" and report.failed and visits is not None:
        with suppress(playwright.Error):
            report.sections.append(("Pages", visits.seen()))
    return report


@pytest.fixture
def screenshots(request: pytest.FixtureRequest) -> Path | None:
    """The folder of the option ``--screenshots``."""
    folder = request.config.getoption("--screenshots")
    return None if folder is None else Path(folder)
