"""Use it and Jobs, in a real browser: snippets that work, exports, the list of jobs."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from fastapi import FastAPI

from patches import from_shorthand
from service.export.targets import TARGETS
from tests.conftest import ROOT
from tests.service.ui.conftest import USUAL, Visits, playwright

pytestmark = pytest.mark.slow
expect = playwright.expect


def copied(page: playwright.Page, card: str) -> str:
    """The text that a card's button copies."""
    page.get_by_role("region", name=card, exact=True).get_by_role("button", name="Copy", exact=True).click()
    text: str = page.evaluate("navigator.clipboard.readText()")
    return text


def test_what_is_copied_works(small: tuple[str, FastAPI], visits: Visits) -> None:
    url, _ = small
    context = visits.context(permissions=["clipboard-read", "clipboard-write"])
    page = visits.open(f"{url}/ui/#use", context)
    page.get_by_label("Encoding", exact=True).fill("self_extend:group_size=4")
    expect(page.get_by_role("region", name="curl")).to_contain_text("group_size=4")
    curl = shlex.split(copied(page, "curl"))
    (body,) = (json.loads(curl[curl.index(flag) + 1]) for flag in ("-d",))
    assert httpx.post(curl[2], json=body, timeout=60).json()["results"][0]["pe"]["group_size"] == 4
    alias = copied(page, "Model alias, for any OpenAI client")
    completion = {"model": alias, "prompt": "The", "max_tokens": 4, "temperature": 0}
    assert httpx.post(f"{url}/v1/completions", json=completion, timeout=60).status_code == 200
    for name in ("Python client", "openai client"):
        compile(copied(page, name), name, "exec")
    assert url in copied(page, "Python client")
    page.get_by_label("Encoding", exact=True).fill('{"method": "yarn", "factor": 4}')
    expect(page.get_by_role("region", name="curl")).to_contain_text("factor")
    expect(page.get_by_role("region", name="Model alias")).to_have_count(0)
    (given,) = re.findall(r"create\((.*)\)", copied(page, "openai client"))
    asked = eval(f"dict({given})")
    asked.update(asked.pop("extra_body"))
    answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=60)
    assert answer.status_code == 200, answer.text


def test_every_system_has_a_card(small: tuple[str, FastAPI], visits: Visits) -> None:
    url, _ = small
    page = visits.open(f"{url}/ui/#use")
    heads = page.locator(".card h4")
    for target in TARGETS:
        expect(heads.filter(has_text=re.compile(rf"^{re.escape(target)}\b"))).to_have_count(1)
    vllm = httpx.post(f"{url}/export", json={"pe": "yarn:4", "target": "vllm"}).json()
    expect(page.get_by_role("region", name="vllm").locator("pre").first).to_have_text(vllm["usage"])
    for name in ("exllamav3", "tgi"):
        card = page.get_by_role("region", name=name)
        expect(card.locator("pre").first).to_contain_text('"rope_scaling"')
        expect(card.get_by_role("button")).to_have_text(["Copy the entries", "Copy the command"])
        expect(card.locator("code").first).to_have_text("config.json")
    page.get_by_label("Encoding", exact=True).fill("self_extend")
    expect(page.get_by_role("region", name="vllm")).to_contain_text("cannot express self_extend")
    page.get_by_label("Encoding", exact=True).fill("auto")
    expect(page.get_by_label("Encoding", exact=True)).to_have_accessible_description(re.compile("choose one$"))
    page.get_by_label("Encoding", exact=True).fill("yarm")
    expect(page.get_by_label("Encoding", exact=True)).to_have_accessible_description(re.compile("did you mean yarn"))
    expect(page.locator(".card")).to_have_count(0)


def test_the_list_of_targets_is_the_servers() -> None:
    source = (ROOT / "service/ui/source/src/use/snippets.ts").read_text()
    (listed,) = re.findall(r"TARGETS = (\[.*?\]);", source)
    assert json.loads(listed) == list(TARGETS)


def test_jobs_are_listed_opened_cancelled_and_forgotten(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    url, _ = tiny
    page = visits.open(f"{url}/ui/#jobs")
    expect(page.get_by_text("No jobs yet")).to_be_visible()
    body = {"evaluation": "perplexity", "methods": ["default", "yarn:2"], "lengths": [64, 128], "max_tokens": 512}
    quick = httpx.post(f"{url}/jobs", json=body).json()["id"]
    page.get_by_role("button", name="Look again").click()
    page.get_by_role("button", name=f"Open perplexity {quick[:8]}").click()
    job = page.get_by_role("region", name=f"Job {quick[:8]}")
    expect(job.get_by_role("heading").first).to_be_focused()
    expect(job.get_by_text("done · 2 of 2 units")).to_be_visible()
    expect(job.locator(".main-svg").first).to_be_visible()
    assert f"job={quick}" in page.url
    row = page.get_by_role("row").filter(has_text="default, yarn:factor=2")
    expect(row).to_contain_text("2 of 2")
    for text, suffix in (
        ("CSV", "csv"),
        ("Parquet", "parquet"),
        ("PNG", "png"),
        ("SVG", "svg"),
        ("Report, HTML", "html"),
    ):
        with page.expect_download() as download:
            job.get_by_role("link", name=text, exact=True).click()
        path = download.value.path()
        assert path.stat().st_size > 100, suffix
        assert download.value.suggested_filename.endswith(f".{suffix}")
    page.once("dialog", lambda dialog: dialog.dismiss())
    row.get_by_role("button", name="Forget").click()
    assert httpx.get(f"{url}/jobs/{quick}").status_code == 200
    page.once("dialog", lambda dialog: dialog.accept())
    row.get_by_role("button", name="Forget").click()
    expect(page.get_by_text("No jobs yet")).to_be_visible()
    assert httpx.get(f"{url}/jobs/{quick}").status_code == 404
    expect(page.get_by_role("button", name="Look again")).to_be_focused()


def listed(number: int, state: str) -> dict[str, Any]:
    """A job as the server lists it."""
    zeros = dict.fromkeys(("units_done", "units_reused", "tokens_done", "seconds"), 0)
    texts = {"id": f"{number:08}-job", "evaluation": "passkey", "state": state, "created_at": "2026-01-02T03:04:05Z"}
    absent = dict.fromkeys(("model", "seconds_left", "error"))
    totals = {"units_total": 1, "tokens_total": 1, "not_served": [], "models": ["tiny", "tiny-alibi"]}
    return {**zeros, **texts, **absent, **totals, "request": {"methods": SENT}}


NESTED = (
    "self_extend:base=(yarn:factor=4,attention_temperature=log_n),attention_temperature=1.1",
    'yarn:factor=4,attention_temperature={"kind":"yarn","factor":2}',
    "dpe:group_factors=[2,4],base=yarn:factor=4",
)
SENT = ["default", *(from_shorthand(text) for text in NESTED)]
for sent in SENT[1:]:
    if sent.get("attention_temperature") == 1.1:
        sent["attention_temperature"] = {"kind": "constant", "multiplier": 1.1}  # as the server stores it


def aligned(page: playwright.Page) -> None:
    """The cells of a row end at one line, and its buttons are apart, on a telephone too."""
    row = page.get_by_role("row").nth(1)
    assert (
        len({round(cell.bounding_box()["y"] + cell.bounding_box()["height"]) for cell in row.locator("td").all()}) == 1
    )
    page.set_viewport_size({"width": 390, "height": 844})
    opens, forgets = (row.get_by_role("button", name=name).bounding_box() for name in ("Open", "Forget"))
    assert forgets["x"] - opens["x"] - opens["width"] >= 6
    page.set_viewport_size(USUAL)


PARTIAL = {
    "words": ["It keeps `default`."],
    "figures": [],
    "dark": {},
    "script": "",
    "partial": {"missing": {"yarn(factor=4)": 1}},
}


def test_the_figures_before_the_end_of_a_finished_job_are_not_incomplete(
    tiny: tuple[str, FastAPI], visits: Visits
) -> None:
    """The last ones are drawn for seconds after the end, and a too large answer never comes."""
    done = {**listed(7, "done"), "units_done": 1, "links": {}}
    running, answers = {**done, "state": "running", "request": {}}, [(200, PARTIAL), (400, {"error": TOO_LARGE})]
    page = visits.open(f"{tiny[0]}/blank")
    page.route("**/jobs?*", lambda route: route.fulfill(json={"jobs": []}))
    jobs = [running, done]
    page.route("**/jobs/00000007-job", lambda route: route.fulfill(json=jobs.pop(0) if len(jobs) > 1 else jobs[0]))
    page.route("**/jobs/00000007-job/events", lambda route: route.fulfill(content_type="text/event-stream", body=""))

    def figures(route: playwright.Route) -> None:
        status, body = answers.pop(0) if len(answers) > 1 else answers[0]
        route.fulfill(status=status, json=body)

    page.route("**/figures.json", figures)
    page.goto(f"{tiny[0]}/ui/#jobs?job=00000007-job")
    job = page.get_by_role("region", name="Job 00000007")
    expect(job.locator(".words code")).to_have_text("default")
    expect(job.get_by_text("These are the figures before its end")).to_be_visible()
    expect(job.get_by_text("Not complete yet")).to_have_count(0)
    expect(job.get_by_text("this file is too large")).to_be_visible()


TOO_LARGE = {"message": "this file is too large", "param": None, "code": "answer_too_large"}


def test_a_job_that_was_forgotten_elsewhere_is_said_to_be_gone(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    page = visits.open(f"{tiny[0]}/blank")
    page.route("**/jobs?*", lambda route: route.fulfill(json={"jobs": []}))
    page.route("**/jobs/00000007-job", lambda route: route.fulfill(json={**listed(7, "cancelled"), "links": {}}))
    page.goto(f"{tiny[0]}/ui/#jobs?job=00000007-job")
    job = page.get_by_role("region", name="Job 00000007")
    expect(job.get_by_text("cancelled")).to_be_visible()
    page.unroute("**/jobs/00000007-job")
    page.get_by_role("button", name="Look again").click()
    expect(job.get_by_role("alert")).to_contain_text("no such job: 00000007-job")


def test_older_jobs_are_renewed_and_forgotten(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    numbers, state, linked = list(range(60, 0, -1)), "queued", {"links": {"results.csv": "linked"}}
    page = visits.open(f"{tiny[0]}/ui/#use")

    def list_them(route: playwright.Route) -> None:
        query = parse_qs(urlsplit(route.request.url).query)
        before = int(query["before"][0][:8]) if "before" in query else 61
        found = [listed(number, state) for number in numbers if number < before]
        route.fulfill(json={"jobs": found[: int(query["limit"][0])]})

    def forget(route: playwright.Route) -> None:
        numbers.remove(int(route.request.url.rpartition("/")[2][:8]))
        route.fulfill(status=204)

    page.route("**/jobs?*", list_them)
    page.route("**/jobs/*?forget=true", forget)
    page.route("**/jobs/00000004-job", lambda route: route.fulfill(json={**listed(4, "done"), **linked}))
    page.route("**/jobs/*/results.csv", lambda route: route.fulfill(status=500, body=""))
    page.get_by_role("link", name="Jobs").click()
    page.get_by_role("button", name="Older jobs").click()
    expect(page.get_by_role("row")).to_have_count(61)
    expect(page.get_by_role("row").nth(1)).to_contain_text("tiny, tiny-alibi")
    expect(page.get_by_role("row").nth(1).locator(".encodings")).to_have_text(", ".join(["default", *NESTED]))
    expect(page.get_by_role("columnheader", name="Created")).to_be_visible()
    state = "done"
    expect(page.get_by_role("row").filter(has_text="done")).to_have_count(60)
    aligned(page)
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Forget passkey 00000005").click()
    expect(page.get_by_role("row")).to_have_count(60)
    expect(page.get_by_role("button", name="Open passkey 00000004")).to_be_focused()
    page.keyboard.press("Enter")
    job = page.get_by_role("region", name="Job 00000004: passkey")
    page.evaluate("sessionStorage.setItem('ropeway.key', 'any')")
    job.get_by_role("link", name="CSV", exact=True).click()
    expect(job.get_by_role("alert")).to_contain_text("The server answered 500")


def test_a_job_without_methods_has_the_default_ones(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    page = visits.open(f"{tiny[0]}/blank")
    requests = ({"evaluation": "passkey"}, {"evaluation": "recommend"}, {})  # the last one is too long to list
    found = [{**listed(number, "done"), **body, "request": body} for number, body in enumerate(requests)]
    page.route("**/jobs?*", lambda route: route.fulfill(json={"jobs": found}))
    page.goto(f"{tiny[0]}/ui/#jobs")
    expect(page.locator("td.encodings")).to_have_text(["default", "proposed by the methods", ""])


def test_a_link_to_a_job_is_no_path(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    page = visits.open(f"{tiny[0]}/ui/#jobs?job=../models")
    expect(page.get_by_role("alert")).to_contain_text("no such job: ../models")
