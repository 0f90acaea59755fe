"""Reach of encodings, in a real browser: an estimate, curves that grow, a reload in the middle, a verdict, errors."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from transformers import GPT2Config, GPT2LMHeadModel

from service.settings import Settings
from tests.service.conftest import tiny_tokenizer
from tests.service.serving import wait_for
from tests.service.ui.conftest import LIMITS, Visits, playwright, serving

pytestmark = pytest.mark.slow
expect = playwright.expect


TITLES = ["Perplexity", "Recall of passkeys", "Recommendation"]
"""In the order of their ends."""


def prepared(page: playwright.Page, target: int) -> None:
    page.get_by_role("link", name="How far does it read?").click()
    page.get_by_label("Encodings").fill("default self_extend")
    page.get_by_label("Target length, tokens").fill(str(target))


def forget(url: str) -> None:
    """End and forget the jobs of other tests: the page knows from finished ones how long its own will take."""
    for job in httpx.get(f"{url}/jobs?limit=100").json()["jobs"]:
        address = f"{url}/jobs/{job['id']}"
        httpx.delete(address)
        wait_for(partial(is_forgotten, address))
    assert httpx.get(f"{url}/jobs").json()["jobs"] == []


def is_forgotten(address: str) -> bool:
    return httpx.delete(f"{address}?forget=true").status_code == 204


def done(page: playwright.Page) -> None:
    expect(page.locator(".job[data-state=done]")).to_have_count(3, timeout=120_000)


def test_a_sweep_outlives_a_reload_and_ends_with_a_verdict(demo: tuple[str, FastAPI], visits: Visits) -> None:
    url, _ = demo
    forget(url)
    page = visits.open(url)
    refused: list[str] = []
    page.on("response", lambda answer: refused.append(answer.url) if answer.status == 409 else None)
    prepared(page, 384)
    page.get_by_label("Windows of the text").fill("3")
    expect(page.get_by_text(re.compile(r"[\d,]+ tokens in at most \d+ units"))).to_be_visible()
    page.get_by_role("button", name="Estimate the time").click()
    expect(page.get_by_text(re.compile(r"units, about [\d.]+ (s|min)"))).to_be_visible()
    page.get_by_role("button", name="Measure").click()
    expect(page.locator(".job")).to_have_count(3)
    expect(page.get_by_text("units").first).to_be_visible()
    page.reload()
    expect(page.locator(".job")).to_have_count(3)
    done(page)
    titles = page.locator(".job h3")
    assert [title for title in titles.all_inner_texts() if title in TITLES] == TITLES
    first, last = (page.locator(".measured > .job").nth(number).bounding_box() for number in (0, 2))
    assert last["width"] > 1.8 * first["width"], "the third of two columns leaves no empty place"
    assert len(refused) <= 6, "two for each job, however many units it has"
    asked = {job["evaluation"]: job["request"] for job in httpx.get(f"{url}/jobs").json()["jobs"]}
    assert asked["recommend"]["windows"] == 3
    assert "target" not in asked["recommend"]
    assert asked["perplexity"]["max_tokens"] == 3 * 384
    verdict = page.get_by_role("region", name="Recommendation")
    expect(verdict.locator(".words p").first).to_have_text(re.compile(r"^For 384 tokens (use self_extend|keep)"))
    curve = page.get_by_role("region", name="Perplexity")
    expect(curve.locator(".main-svg").first).to_be_visible()
    lines = partial(curve.locator(".drawing").first.evaluate, "div => div.data.map(line => line.name)")
    wait_for(lambda: {"default", "self_extend"} <= {str(name).partition(":")[0] for name in lines()})  # no early figure
    expect(page.get_by_role("region", name="Recall of passkeys").locator(".main-svg").first).to_be_visible()
    other = visits.open(page.url)
    expect(other.locator(".job[data-state=done]")).to_have_count(3)
    csv = page.get_by_role("region", name="Perplexity").get_by_role("link", name="CSV", exact=True)
    assert httpx.get(csv.evaluate("link => link.href")).text.startswith("method,")
    with page.expect_download() as download:
        csv.click()
    assert re.fullmatch(r"perplexity-\w{8}-results\.csv", download.value.suggested_filename)
    links = page.get_by_role("region", name="Perplexity").get_by_role("link")
    assert links.all_inner_texts() == ["CSV", "JSON", "Parquet", "PNG", "SVG", "Report, HTML", "Units, CSV"]
    error = {"error": {"message": "no such file", "param": None, "code": None}}
    page.route("**/results.csv", lambda route: route.fulfill(status=409, json=error))
    csv.click()
    expect(page.get_by_role("region", name="Perplexity").get_by_role("alert")).to_contain_text("no such file")


def test_a_job_is_cancelled_and_resumed(demo: tuple[str, FastAPI], visits: Visits) -> None:
    page = visits.open(demo[0])
    prepared(page, 2048)
    page.get_by_role("button", name="Measure").click()
    recall = page.get_by_role("region", name="Recall of passkeys")
    recall.get_by_role("button", name="Cancel").click()
    expect(recall.get_by_text("cancelled")).to_be_visible()
    for name in ("Perplexity", "Recommendation"):
        region = page.get_by_role("region", name=name)
        if region.get_by_role("button", name="Cancel").count():
            region.get_by_role("button", name="Cancel").click()
    recall.get_by_role("button", name="Resume").click()
    expect(recall.get_by_text(re.compile("queued|running"))).to_be_visible()
    recall.get_by_role("button", name="Cancel").click()
    expect(recall.get_by_role("button", name="Resume")).to_be_visible()


def test_errors_are_beside_the_control(demo: tuple[str, FastAPI], visits: Visits) -> None:
    page = visits.open(demo[0])
    prepared(page, 1)
    expect(page.get_by_label("Target length, tokens")).to_have_accessible_description(
        re.compile("must be a whole number from 64 to 4,194,303, not 1$")
    )
    page.get_by_label("Target length, tokens").fill("512")
    windows = page.get_by_label("Windows of the text")
    windows.fill("1")
    expect(windows).to_have_accessible_description(re.compile("must be a whole number from 2 to 256, not 1$"))
    page.get_by_label("Target length, tokens").fill("1000000")
    windows.fill("9")
    expect(windows).to_have_accessible_description(re.compile("must be a whole number from 2 to 8, not 9$"))
    page.get_by_label("Target length, tokens").fill("512")
    windows.fill("3")
    page.get_by_label("Encodings").fill("default yarm")
    expect(page.get_by_label("Encodings")).to_have_accessible_description(re.compile("yarm: unknown method 'yarm'"))
    page.get_by_label("Encodings").fill("default,yarn:4")
    expect(page.get_by_label("Encodings")).to_have_accessible_description(re.compile("; separate encodings by spaces$"))
    page.get_by_label("Encodings").fill("default, yarn:4,")
    expect(page.get_by_text(re.compile(r"tokens in at most \d+ units"))).to_be_visible()
    page.get_by_label("Encodings").fill("default")
    page.get_by_label("Text", exact=True).select_option("own")
    expect(page.get_by_label("Your text")).to_have_accessible_description(re.compile("needs at least 1 character"))
    file = page.get_by_label("Or choose a text file")
    file.set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": b"\x89PNG\r\n\x00"})
    expect(file).to_have_accessible_description("a.png is not a text in UTF-8.")
    long = b"a" * (Settings.model_fields["max_text_bytes"].default + 1)
    file.set_input_files({"name": "long.txt", "mimeType": "text/plain", "buffer": long})
    expect(file).to_have_accessible_description("long.txt is too long: a text may have 2,097,152 characters.")
    file.set_input_files(
        {"name": "a.txt", "mimeType": "text/plain", "buffer": b"The ropes of the ways are long. " * 400}
    )
    expect(page.get_by_label("Your text")).to_have_value(re.compile("^The ropes"))
    expect(page.get_by_text(re.compile(r"tokens in at most \d+ units"))).to_be_visible()
    page.reload()
    expect(page.get_by_label("Your text")).to_have_value(re.compile("^The ropes"))
    page.get_by_label("Your text").fill("שלום")
    expect(page.get_by_label("Your text")).to_have_css("direction", "rtl")


def test_it_measures_as_it_opens_and_not_while_a_field_is_wrong(demo: tuple[str, FastAPI], visits: Visits) -> None:
    url, _ = demo
    forget(url)
    page = visits.open(f"{url}/ui/#reach")
    estimate = page.get_by_text(re.compile(r"tokens in at most \d+ units"))
    target, encodings = page.get_by_label("Target length, tokens"), page.get_by_label("Encodings")
    expect(estimate).to_be_visible()
    target.fill("10")
    expect(target).to_have_accessible_description(re.compile("must be a whole number from 64"))
    expect(estimate).to_have_count(0)
    page.get_by_role("button", name="Measure").click()
    expect(target).to_be_focused()
    target.fill("")
    encodings.fill("auto yarn:0.5 yarm")
    expect(encodings).to_have_accessible_description(
        re.compile(r"yarn:0\.5: factor: must be at least 1, not 0\.5; yarm: unknown method 'yarm'")
    )
    page.get_by_role("button", name="Measure").click()
    expect(encodings).to_be_focused()
    assert httpx.get(f"{url}/jobs").json()["jobs"] == []
    page = visits.open(f"{url}/ui/#reach", visits.context())
    expect(page.get_by_label("Encodings")).to_have_value("default auto self_extend yarn:4")
    page.get_by_role("button", name="Measure").click()
    expect(page.locator(".job")).to_have_count(3)
    jobs = {job["evaluation"]: job["request"]["methods"] for job in httpx.get(f"{url}/jobs").json()["jobs"]}
    assert {name: len(methods) for name, methods in jobs.items()} == {"perplexity": 4, "passkey": 4, "recommend": 3}
    forget(url)


def test_it_opens_with_encodings_past_the_end_of_a_table(visits: Visits, tmp_path: Path) -> None:
    """Of a model whose trained length holds no passkey."""
    sizes = {"n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    tokenizer = tiny_tokenizer()
    config = GPT2Config(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=1, **sizes)
    for part in (GPT2LMHeadModel(config), tokenizer):
        part.save_pretrained(tmp_path / "table")
    with serving(tmp_path, model=str(tmp_path / "table"), **LIMITS) as (url, _):
        page = visits.open(f"{url}/ui/#reach")
        expect(page.get_by_text(re.compile(r"tokens in at most \d+ units"))).to_be_visible()
        expect(page.get_by_label("Encodings")).to_have_value("learned_interpolation:factor=4 learned_hierarchical")


def test_jobs_before_a_refusal_are_kept_and_a_correction_removes_it(demo: tuple[str, FastAPI], visits: Visits) -> None:
    url, _ = demo
    page = visits.open(url)
    prepared(page, 384)
    error = {"error": {"message": "methods: not now", "param": "methods", "code": None}}
    page.route(f"{url}/jobs", lambda route: route.fulfill(status=400, json=error))
    page.route(f"{url}/jobs", lambda route: route.continue_(), times=1)
    page.get_by_role("button", name="Measure").click()
    expect(page.get_by_label("Encodings")).to_have_accessible_description(re.compile("not now"))
    expect(page.locator(".job")).to_have_count(1)
    page.get_by_label("Encodings").fill("default")
    expect(page.get_by_label("Encodings")).to_have_accessible_description("Short forms with spaces between them")
    forget(url)


def test_a_reload_while_jobs_start_finds_each_once(demo: tuple[str, FastAPI], visits: Visits) -> None:
    url, _ = demo
    forget(url)
    page = visits.open(url)
    prepared(page, 384)
    made: list[str] = []

    def unanswered(route: playwright.Route) -> None:
        """The server makes the job, and the page is gone before the answer."""
        made.append(route.fetch().json()["id"])

    page.route(f"{url}/jobs", unanswered, times=1)
    page.get_by_role("button", name="Measure").click()
    wait_for(lambda: page.evaluate("1") and made)
    page.reload()
    expect(page.locator(".job")).to_have_count(3)
    jobs = httpx.get(f"{url}/jobs").json()["jobs"]
    assert len(jobs) == 3
    assert jobs[-1]["id"] == made[0]
    assert page.evaluate("sessionStorage.getItem('ropeway.starting')") is None, "the next start has another key"
    forget(url)


def test_jobs_of_a_link_need_no_model(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    url, _ = tiny
    body = {"evaluation": "perplexity", "methods": ["default"], "lengths": [64], "max_tokens": 128}
    job = httpx.post(f"{url}/jobs", json=body).json()["id"]
    page = visits.open(f"{url}/ui/#reach?model=gone&jobs[]=perplexity:{job}")
    expect(page.get_by_role("combobox", name="Model")).to_have_value("gone")
    expect(page.get_by_role("region", name="Perplexity").locator(".main-svg").first).to_be_visible()
    forget(url)


def test_a_recommendation_for_another_system(demo: tuple[str, FastAPI], visits: Visits) -> None:
    url, _ = demo
    page = visits.open(f"{url}/ui/#reach?system=mainframe")
    system = page.get_by_label("Recommend for")
    expect(system).to_have_value("mainframe")  # before the click on the tab, whose address has no settings
    prepared(page, 384)
    expect(system).to_have_accessible_description(re.compile("unknown target 'mainframe'"))
    system.select_option("vllm")
    expect(page.get_by_text(re.compile(r"tokens in at most \d+ units"))).to_be_visible()
    page.get_by_role("button", name="Measure").click()
    expect(page.locator(".job")).to_have_count(3)
    asked = {job["evaluation"]: job["request"].get("target") for job in httpx.get(f"{url}/jobs").json()["jobs"]}
    assert asked == {"perplexity": None, "passkey": None, "recommend": "vllm"}
    forget(url)


def test_the_estimate_learns_from_jobs_that_reused_units(demo: tuple[str, FastAPI], visits: Visits) -> None:
    page = visits.open(f"{demo[0]}/blank")
    one = {"model": "ropeway-demo", "tokens_done": 1000, "tokens_reused": 900, "seconds": 1.0}
    of_all = [{**one, "evaluation": name} for name in ("perplexity", "passkey", "recommend")]
    page.route("**/jobs?*", lambda route: route.fulfill(json={"jobs": of_all}))
    page.route("**/jobs/plan", lambda route: route.fulfill(json={"units": 2, "tokens": 2000}))
    page.goto(f"{demo[0]}/ui/#reach")
    estimate = page.get_by_text("6,000 tokens in at most 6 units")
    expect(estimate).to_contain_text("about 60 s; finished units are not measured again")  # 100 tokens a second


def test_the_size_is_asked_for_again(demo: tuple[str, FastAPI], visits: Visits) -> None:
    page = visits.open(demo[0])
    page.route("**/jobs/plan", lambda route: route.abort())
    prepared(page, 384)
    expect(page.get_by_role("alert")).to_contain_text("The server cannot be reached.")
    page.unroute("**/jobs/plan")
    held: list[playwright.Route] = []
    page.route("**/jobs/plan", lambda route: held.append(route))
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_text("Counting the tokens to read")).to_be_visible()
    page.unroute("**/jobs/plan")
    for route in held:
        route.continue_()
    expect(page.get_by_text(re.compile(r"tokens in at most \d+ units"))).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)
