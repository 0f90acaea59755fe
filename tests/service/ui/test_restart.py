"""Sweeps on the page, in a real browser: a restart of the server in the middle. Jobs are detached and opened again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from service.models.checkpoint.loading import DEMO
from tests.service.serving import process, wait_for
from tests.service.ui.conftest import Visits, playwright
from tests.service.ui.proxy import proxied

pytestmark = pytest.mark.slow
expect = playwright.expect

LENGTHS = [256, 512]


def measure(page: playwright.Page, url: str, methods: str) -> dict[str, str]:
    """Identifiers of the jobs that the page starts, by evaluation."""
    page.get_by_label("Encodings").fill(methods)
    page.get_by_label("Target length, tokens").fill(str(LENGTHS[-1]))
    page.get_by_role("button", name="Measure").click()
    expect(page.locator(".job")).to_have_count(3)
    return {job["evaluation"]: job["id"] for job in httpx.get(f"{url}/jobs?limit=3").json()["jobs"]}


def job_of(url: str, job: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{url}/jobs/{job}").json()
    return found


def test_a_sweep_goes_on_after_a_restart(tmp_path: Path, visits: Visits) -> None:
    database = f"database_url=sqlite:///{tmp_path / 'jobs.db'}"
    settings = ("cache_tokens=8192", "score_tokens=8192", "score_chunk=256", database)
    with proxied("http://127.0.0.1:9") as proxy:
        with process(DEMO, *settings, log=tmp_path / "first") as (running, proxy.target):
            page = visits.open(f"{proxy.url}/ui/#reach")
            sweep = measure(page, proxy.target, "default self_extend")["perplexity"]
            listed = visits.open(f"{proxy.url}/ui/#jobs")
            expect(listed.get_by_role("row")).to_have_count(4)
            wait_for(lambda: job_of(proxy.target, sweep)["units_done"], 60)
            before = job_of(proxy.target, sweep)
            running.kill()
            assert before["state"] == "running", "it was to be killed in the middle"
            expect(page.get_by_role("alert").first).to_contain_text("The server cannot be reached.")
            expect(listed.get_by_role("alert")).to_contain_text("The server cannot be reached.")
        with process(DEMO, *settings, log=tmp_path / "second") as (_, proxy.target):
            expect(page.locator(".job[data-state=done]")).to_have_count(3, timeout=120_000)
            expect(page.get_by_role("alert")).to_have_count(0)
            assert sweep in page.url
            curve = page.get_by_role("region", name="Perplexity").locator(".drawing").first
            expect(curve.locator(".main-svg").first).to_be_visible()
            ends = "div => (div.data ?? []).filter(line => line.x?.length > 1).map(line => Math.max(...line.x))"
            # Lines lie a little aside from each other.
            wait_for(lambda: {round(end, -2) for end in curve.evaluate(ends)} == {round(LENGTHS[-1], -2)})
            expect(listed.get_by_role("row").filter(has_text="done")).to_have_count(3)
            expect(listed.get_by_role("alert")).to_have_count(0)
            jobs = httpx.get(f"{proxy.target}/jobs").json()["jobs"]
            assert [(job["state"], job["units_done"] == job["units_total"]) for job in jobs] == [("done", True)] * 3


def test_a_job_is_detached_and_opened_by_keys(demo: tuple[str, FastAPI], visits: Visits) -> None:
    url, _ = demo
    page = visits.open(f"{url}/ui/#reach")
    jobs = measure(page, url, "yarn:2 yarn:3")
    job = jobs["recommend"]
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    verdict = page.get_by_role("region", name="Recommendation")
    verdict.get_by_role("button", name="Detach Recommendation").press("Enter")
    expect(verdict).to_have_attribute("data-state", "detached")
    expect(verdict.get_by_role("status")).to_have_text("Detached: the job goes on, and this page does not follow it.")
    expect(verdict.get_by_role("button", name="Open Recommendation")).to_be_focused()
    asked.clear()
    page.reload()
    expect(page.get_by_role("region", name="Perplexity").get_by_role("button", name="Cancel")).to_be_visible()
    expect(verdict).to_have_attribute("data-state", "detached")
    assert not [one for one in asked if job in one and "/ui/" not in one]
    assert job_of(url, job)["state"] in ("queued", "running")
    verdict.get_by_role("button", name="Open Recommendation").press("Enter")
    expect(verdict.get_by_text(re.compile("(queued|running) ·"))).to_be_visible()

    page.get_by_role("link", name="Jobs").click()
    opener = page.get_by_role("button", name=f"Open recommend {job[:8]}")
    opener.click()
    opened = page.get_by_role("region", name=f"Job {job[:8]}")
    opened.get_by_role("button", name=f"Detach Job {job[:8]}").press("Enter")
    expect(opened).to_have_count(0)
    expect(opener).to_be_focused()
    assert job_of(url, job)["state"] in ("queued", "running")
    page.keyboard.press("Enter")
    opened.get_by_role("button", name="Cancel").click()
    opened.get_by_role("button", name=f"Close Job {job[:8]}").click()
    expect(opened).to_have_count(0)
    assert job_of(url, job)["state"] == "cancelled"
    for started in jobs.values():
        httpx.delete(f"{url}/jobs/{started}")
