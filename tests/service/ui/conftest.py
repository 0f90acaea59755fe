"""The page in the machine's own Chromium, on the demo models and on the tiny ones."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from fastapi import FastAPI

from tests.service.serving import serving

try:
    from playwright import sync_api as playwright
except ImportError:  # the tests without a browser run all the same
    playwright = SimpleNamespace(expect=None)

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


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, FastAPI]]:
    """(base URL, application) of a server of the demo models."""
    folder = tmp_path_factory.mktemp("demo")
    limits = {"cache_tokens": 8192, "score_tokens": 8192, "max_batch_tokens": 512, "score_chunk": 256}
    with serving(folder, model="demo", **limits) as served:
        yield served


class Visits:
    """Opens pages and collects what they must not do: errors on the console, requests to other hosts."""

    def __init__(self, browser: playwright.Browser) -> None:
        self._browser, self._stack = browser, ExitStack()
        self.faults: list[str] = []

    def open(self, url: str, context: playwright.BrowserContext | None = None) -> playwright.Page:
        """The page at ``url``, in a browser without a past unless ``context`` is given."""
        page = (context or self.context()).new_page()
        host = urlsplit(url).netloc
        page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        page.on("console", lambda message: self._heard(message))
        page.on("request", lambda request: self._asked(request.url, host))
        page.goto(url)
        return page

    def context(self, **options: object) -> playwright.BrowserContext:
        usual = {"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce"}
        context = self._browser.new_context(**usual | options)
        context.set_default_timeout(SECONDS * 1000)
        self._stack.callback(context.close)
        return context

    def _heard(self, message: playwright.ConsoleMessage) -> None:
        refused = "Failed to load resource" in message.text  # Chromium's own line about every answer from 400 on
        if message.type in ("error", "warning") and not refused:
            self.faults.append(f"console: {message.text}")

    def _asked(self, url: str, host: str) -> None:
        if urlsplit(url).scheme not in ("data", "blob") and urlsplit(url).netloc != host:
            self.faults.append(f"request: {url}")

    def close(self) -> None:
        self._stack.close()
        assert self.faults == []


@pytest.fixture
def visits(browser: playwright.Browser) -> Iterator[Visits]:
    visits = Visits(browser)
    yield visits
    visits.close()


@pytest.fixture
def screenshots(request: pytest.FixtureRequest) -> Path | None:
    """The folder of the option ``--screenshots``."""
    folder = request.config.getoption("--screenshots")
    return None if folder is None else Path(folder)
