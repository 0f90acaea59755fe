"""Jobs, in a real browser: what each was asked, actions and downloads that fail, and jobs beside each other."""

from __future__ import annotations

import csv
import re
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from fastapi import FastAPI

from service.api.jobs.comparison import MOST
from tests.service.serving import wait_for
from tests.service.ui.conftest import Visits, playwright

pytestmark = pytest.mark.slow
expect = playwright.expect

NUMBERS = ("units_done", "units_reused", "tokens_done", "tokens_reused", "tokens_total", "units_total", "seconds")


def described(number: int, state: str = "done", evaluation: str = "perplexity", **more: Any) -> dict[str, Any]:
    """A job as the server describes it."""
    texts = {"id": f"{number:08}-job", "evaluation": evaluation, "state": state, "created_at": "2026-01-02T03:04:05Z"}
    absent = dict.fromkeys(("seconds_left", "error", "stalled"))
    body = {"request": {}, "links": {}, "models": ["tiny"], "model": None, "not_served": []}
    return {**dict.fromkeys(NUMBERS, 1), **absent, **texts, **body, **more}


def fulfilled(job: dict[str, Any], route: playwright.Route) -> None:
    route.fulfill(json=job)


def listing(page: playwright.Page, url: str, *jobs: dict[str, Any]) -> None:
    """Open the list of ``jobs``, which are those of the server from now on."""
    page.route("**/jobs?*", lambda route: route.fulfill(json={"jobs": list(jobs)}))
    for job in jobs:
        page.route(f"**/jobs/{job['id']}", partial(fulfilled, job))
    page.goto(f"{url}/ui/#jobs")


REQUESTS = (
    ({"lengths": [1024, 256], "input": "persuasion"}, "256 to 1,024 tokens · persuasion"),
    ({"length": 512, "input": ["It was late. "]}, "512 tokens · a text of 13 characters"),
    ({"lengths": {"start": 64, "stop": 96, "step": 8}, "input": [[5, 6]]}, "64 to 96 tokens · 2 token ids"),
    ({"input": ["a"] * 5, "names": ["one", "two", "three", "four", "five"]}, "one, two, three and 2 more"),
    ({"evaluations": [{"evaluation": "perplexity"}, {"evaluation": "needle"}]}, "perplexity, needle"),
)  # fmt: skip


def test_a_job_says_what_it_was_asked(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    page = visits.open(f"{tiny[0]}/blank")
    jobs = [described(number, "queued", request=body) for number, (body, _) in enumerate(REQUESTS)]
    listing(page, tiny[0], *jobs, described(9))
    expect(page.locator("td:first-child .hint")).to_have_text([text for _, text in REQUESTS])
    page.route("**/events", lambda route: None)
    page.get_by_role("button", name="Open perplexity 00000001").click()
    expect(page.get_by_role("region", name="Job 00000001").locator(".hint").first).to_have_text(REQUESTS[1][1])


def test_a_cancel_that_failed_is_repeated_and_then_forgotten(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    page = visits.open(f"{tiny[0]}/blank")
    job = described(1, "running")
    listing(page, tiny[0])
    page.route("**/jobs/00000001-job/events", lambda route: None)
    page.route("**/jobs/00000001-job/figures.json", lambda route: route.fulfill(status=409, body=""))
    cancels: list[int] = []

    def answer(route: playwright.Route) -> None:
        if route.request.method == "DELETE":
            cancels.append(1)
            job["state"] = "running" if len(cancels) < 2 else "cancelled"
        route.fulfill(json=job) if route.request.method == "GET" or len(cancels) > 1 else route.abort()

    page.route("**/jobs/00000001-job", answer)
    page.goto(f"{tiny[0]}/ui/#jobs?job=00000001-job")
    shown = page.get_by_role("region", name="Job 00000001")
    shown.get_by_role("button", name="Cancel").click()
    expect(shown.get_by_role("alert")).to_contain_text("The job was not cancelled: The server cannot be reached.")
    expect(shown.get_by_role("heading").first).to_be_focused()
    shown.get_by_role("button", name="Try again").click()
    expect(shown.get_by_role("button", name="Resume")).to_be_visible()
    expect(shown.get_by_role("alert")).to_have_count(0)
    expect(shown.get_by_role("heading").first).to_be_focused()
    assert len(cancels) == 2


def test_a_failed_cancel_has_no_purpose_after_the_end(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    page = visits.open(f"{tiny[0]}/blank")
    job = described(1, "running")
    listing(page, tiny[0])
    page.route("**/jobs/00000001-job/*", lambda route: route.fulfill(status=409, body=""))
    page.route(
        "**/jobs/00000001-job",
        lambda route: route.fulfill(json=job) if route.request.method == "GET" else route.abort(),
    )
    page.goto(f"{tiny[0]}/ui/#jobs?job=00000001-job")
    shown = page.get_by_role("region", name="Job 00000001")
    shown.get_by_role("button", name="Cancel").click()
    expect(shown.get_by_role("alert")).to_contain_text("The job was not cancelled")
    job["state"] = "done"
    page.get_by_role("button", name="Look again").click()
    expect(shown.get_by_text("done ·")).to_be_visible()
    expect(shown.get_by_text("The job was not cancelled")).to_have_count(0)


def test_a_download_is_made_once(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    page = visits.open(f"{tiny[0]}/blank")
    listing(page, tiny[0], described(1, links={"report.html": "linked"}, units_done=0))
    held: list[playwright.Route] = []
    page.route("**/report.html?*", lambda route: held.append(route))
    page.get_by_role("button", name="Open perplexity 00000001").click()
    link = page.get_by_role("link", name="Report, HTML")
    link.dblclick()
    expect(page.get_by_text("Making the file Report, HTML")).to_be_visible()
    expect(link).to_have_attribute("aria-busy", "true")
    link.click()
    assert len(held) == 1
    with page.expect_download() as download:
        held[0].fulfill(body="<p>A report</p>", content_type="text/html")
    assert download.value.path().read_text() == "<p>A report</p>"
    expect(link).to_have_attribute("aria-busy", "false")
    expect(page.get_by_text("Making the file")).to_have_count(0)


def measured(url: str, model: str, evaluation: str = "perplexity", **more: Any) -> str:
    """The id of a finished job of ``model``."""
    body = {"evaluation": evaluation, "methods": ["default"], "model": model, "lengths": [64, 128], **more}
    job: str = httpx.post(f"{url}/jobs", json=body, timeout=60).raise_for_status().json()["id"]
    wait_for(lambda: httpx.get(f"{url}/jobs/{job}").json()["state"] == "done", 60)
    return job


def test_jobs_are_compared_and_the_link_compares_them(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    url, _ = tiny
    one, other = (model["id"] for model in httpx.get(f"{url}/models").json()["models"][:2])
    size = {"max_tokens": 512}
    ids = [measured(url, one, **size), measured(url, other, **size)]
    third = measured(url, one, max_tokens=512, protocol="tail")
    recall = measured(url, one, "passkey", lengths=[256], depths=[0.5], samples=1)
    page = visits.open(f"{url}/ui/#jobs")
    switches = [page.get_by_role("button", name=f"Compare perplexity {job[:8]}") for job in (*ids, third)]
    switches[0].press("Enter")
    expect(switches[0]).to_be_focused()
    expect(switches[0]).to_have_attribute("aria-pressed", "true")
    shown = page.get_by_role("region", name="Comparison")
    expect(shown.get_by_role("status")).to_contain_text("Choose another job")
    expect(page.get_by_role("button", name=f"Compare passkey {recall[:8]}")).to_be_disabled()
    switches[1].click()
    expect(shown.locator(".main-svg").first).to_be_visible()
    expect(shown.locator(".words")).to_contain_text(other)
    expect(shown.get_by_role("listitem")).to_contain_text([ids[0][:8], ids[1][:8]])
    assert parse_qs(urlsplit(page.url).fragment)["compare[]"] == ids
    with page.expect_download() as download:
        shown.get_by_role("link", name="CSV").click()
    assert f"{one}" in Path(download.value.path()).read_text()
    receiver = visits.open(page.url)
    expect(receiver.get_by_role("region", name="Comparison").locator(".main-svg").first).to_be_visible()
    switches[2].click()
    expect(shown.get_by_role("alert")).to_contain_text("protocol is curve in")
    expect(shown.locator(".figures")).to_have_count(0)
    switches[2].click()
    expect(shown.locator(".main-svg").first).to_be_visible()
    expect(shown.get_by_role("alert")).to_have_count(0)
    shown.get_by_role("button", name="End the comparison").click()
    expect(shown).to_have_count(0)
    expect(page.get_by_role("button", name="Look again")).to_be_focused()
    for job in (*ids, third, recall):
        httpx.delete(f"{url}/jobs/{job}?forget=true").raise_for_status()
    page.goto(f"{url}/ui/#jobs?compare[]={ids[0]}&compare[]=../models")
    expect(shown.get_by_role("alert")).to_contain_text("no such job: ../models")


def test_results_have_names_and_a_method_that_all_are_compared_with(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    url, _ = tiny
    model = httpx.get(f"{url}/models").json()["models"][0]["id"]
    ids = [measured(url, model, methods=["default", "yarn:4"], max_tokens=tokens) for tokens in (256, 256)]
    page = visits.open(f"{url}/ui/#jobs?compare[]={ids[0]}&compare[]={ids[1]}")
    shown = page.get_by_role("region", name="Comparison")
    chosen = shown.get_by_label("Compared with")
    expect(chosen.locator("option")).to_have_count(5)
    chosen.select_option(f"yarn(factor=4) ({ids[1][:8]})")
    expect(shown.locator(".words")).to_contain_text(f"the perplexity of yarn(factor=4) ({ids[1][:8]})")
    fields = [shown.get_by_label(f"Name of {job[:8]}") for job in ids]
    fields[1].fill("after, tuned")
    expect(fields[1]).to_have_value("after tuned")
    expect(fields[0]).to_have_attribute("placeholder", ids[0][:8])
    fields[1].press("Enter")
    expect(chosen).to_have_value("yarn(factor=4) (after tuned)")
    expect(shown.locator(".words")).to_contain_text("the perplexity of yarn(factor=4) (after tuned)")
    with page.expect_download() as download:
        shown.get_by_role("link", name="CSV").click()
    rows = list(csv.DictReader(Path(download.value.path()).read_text().splitlines()))
    assert {row["source"] for row in rows} == {ids[0][:8], "after tuned"}
    assert {row["partner"] for row in rows} == {"", "yarn(factor=4) (after tuned)"}
    wait_for(lambda: "names%5B%5D" in page.url, 10)
    receiver = visits.open(page.url).get_by_role("region", name="Comparison")
    expect(receiver.get_by_label(f"Name of {ids[1][:8]}")).to_have_value("after tuned")
    expect(receiver.locator(".words")).to_contain_text("the perplexity of yarn(factor=4) (after tuned)")
    fields[0].fill("after tuned")
    fields[0].press("Enter")
    expect(shown.get_by_role("alert")).to_have_text("two results have the name 'after tuned': give each its own")
    fields[0].fill("")
    fields[0].press("Enter")
    expect(shown.get_by_role("alert")).to_have_count(0)
    switch = page.get_by_role("button", name=f"Compare perplexity {ids[1][:8]}")
    switch.click()
    switch.click()
    expect(chosen).to_have_value("")
    expect(fields[1]).to_have_value("")
    for job in ids:
        httpx.delete(f"{url}/jobs/{job}?forget=true").raise_for_status()


def test_a_name_renames_no_other_result_of_jobs_outside_the_list(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    url, _ = tiny
    models = [model["id"] for model in httpx.get(f"{url}/models").json()["models"][:2]]
    ids = [measured(url, model, max_tokens=512) for model in models]
    page = visits.open(f"{url}/blank")
    listing(page, url)
    page.goto(f"{url}/ui/#jobs?compare[]={ids[0]}&compare[]={ids[1]}")
    shown = page.get_by_role("region", name="Comparison")
    fields = [shown.get_by_label(f"Name of {job[:8]}") for job in ids]
    for field, model in zip(fields, models, strict=True):
        expect(field).to_have_attribute("placeholder", model)
    chosen = shown.get_by_label("Compared with")
    chosen.select_option(f"default ({models[1]})")
    fields[1].fill("tuned")
    fields[1].press("Enter")
    expect(chosen).to_have_value("default (tuned)")
    with page.expect_download() as download:
        shown.get_by_role("link", name="CSV").click()
    rows = csv.DictReader(Path(download.value.path()).read_text().splitlines())
    assert {row["source"] for row in rows} == {models[0], "tuned"}
    fields[1].fill("")
    fields[1].press("Enter")
    expect(chosen).to_have_value(f"default ({models[1]})")
    expect(shown.locator(".words")).to_contain_text(models[1])
    for job in ids:
        httpx.delete(f"{url}/jobs/{job}?forget=true").raise_for_status()


def test_a_default_text_is_in_the_list(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    url, _ = tiny
    model = httpx.get(f"{url}/models").json()["models"][0]["id"]
    job = measured(url, model, max_tokens=256)
    page = visits.open(f"{url}/ui/#jobs")
    row = page.get_by_role("row").filter(has=page.get_by_role("button", name=f"Open perplexity {job[:8]}"))
    expect(row.locator(".hint")).to_have_text("64 to 128 tokens · persuasion")
    httpx.delete(f"{url}/jobs/{job}?forget=true").raise_for_status()


def test_at_most_as_many_as_the_server_compares(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    page = visits.open(f"{tiny[0]}/blank")
    page.route(
        "**/comparisons/**",
        lambda route: route.fulfill(
            status=400, json={"error": {"message": "jobs: why", "code": None, "param": "jobs"}}
        ),
    )
    listing(
        page,
        tiny[0],
        *(described(number) for number in range(MOST + 1)),
        described(90, evaluation="search"),
        described(91, "failed"),
    )
    switches = page.get_by_role("button", name=re.compile("^Compare"))
    expect(switches).to_have_count(MOST + 1)
    for number in range(MOST):
        switches.nth(number).click()
    expect(switches.nth(MOST)).to_be_disabled()
    expect(page.get_by_role("region", name="Comparison").get_by_role("alert")).to_have_text("why")
