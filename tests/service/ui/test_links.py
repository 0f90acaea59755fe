"""Links, reloads, models that are gone, keys and prefixes: Generate from one visit to the next."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.service.serving import idle, process, serving, wait_for
from tests.service.ui.answers import PARTS, all_done, answers, texts
from tests.service.ui.conftest import Visits, playwright
from tests.service.ui.proxy import proxied

pytestmark = pytest.mark.slow
expect = playwright.expect


def models_of(url: str) -> list[str]:
    return [model["id"] for model in httpx.get(f"{url}/models").json()["models"]]


def test_a_model_that_is_not_served_has_no_substitute(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    names = models_of(tiny[0])
    page = visits.open(f"{tiny[0]}/blank")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if request.method == "POST" else None)
    model = page.get_by_role("combobox", name="Model").locator("visible=true")
    for part in PARTS:
        page.goto(f"{tiny[0]}/ui/#{part}?model=gone")
        expect(model).to_have_value("gone")
        expect(model).to_have_accessible_description(f"gone is not served here: choose {' or '.join(names)}")
    page.wait_for_timeout(600)  # the parts ask once their controls rest
    assert asked == []
    for part in PARTS:
        page.goto(f"{tiny[0]}/ui/#{part}?model=gone&pe[]=default")
        model.select_option(names[1])
        expect(model).to_be_focused()
        expect(model).to_have_attribute("aria-invalid", "false")
    page.get_by_role("link", name="Generate", exact=True).click()
    page.get_by_role("button", name="Generate").click()
    all_done(page, 1)
    page.get_by_text("Encoding in effect").first.click()
    expect(answers(page).first.get_by_role("row", name="model")).to_contain_text(names[1])
    page.goto(f"{tiny[0]}/ui/#generate?model=gone")
    expect(model).to_have_value("gone")
    page.reload()
    expect(model).to_have_value("gone")


def test_a_remembered_model_that_is_not_served_is_forgotten(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    page = visits.open(f"{tiny[0]}/blank")
    for part in PARTS:
        page.evaluate("part => localStorage.setItem(`ropeway.${part}`, JSON.stringify({model: 'gone'}))", part)
        page.goto(f"{tiny[0]}/ui/#{part}")
        model = page.get_by_role("combobox", name="Model").locator("visible=true")
        expect(model).to_have_value(models_of(tiny[0])[0])


def test_a_reload_and_a_link_bring_everything_back(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    page = visits.open(tiny[0])
    page.get_by_label("Prompt", exact=True).fill("Two ropes & a = b?\n#3")
    page.get_by_role("button", name="Remove encoding 2").click()
    page.get_by_label("Encoding 1", exact=True).fill("yarn:2")
    page.get_by_label("Most new tokens").fill("12")
    page.get_by_role("button", name="Generate").click()
    all_done(page, 3)
    before = texts(page)
    page.reload()
    all_done(page, 3)
    assert texts(page) == before
    expect(page).to_have_url(re.compile("Two"))
    link = page.url
    other = visits.open(link)
    expect(other.get_by_label("Prompt", exact=True)).to_have_value("Two ropes & a = b?\n#3")
    expect(other.get_by_label("Encoding 1", exact=True)).to_have_value("yarn:2")
    expect(other.get_by_label("Encoding 4", exact=True)).to_have_count(0)
    expect(other.get_by_label("Most new tokens")).to_have_value("12")
    expect(answers(other)).to_have_count(0)


def test_a_link_without_its_long_text_says_so_and_brings_no_other(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    sender = visits.open(tiny[0], visits.context(permissions=["clipboard-read", "clipboard-write"]))
    prompt = sender.get_by_label("Prompt", exact=True)
    prompt.fill("long " * 2000)
    expect(sender).to_have_url(re.compile("prompt-left-out="))
    sender.get_by_role("button", name="Copy link").click()
    expect(sender.get_by_role("button", name="Copied without the text")).to_be_visible()
    link = sender.evaluate("navigator.clipboard.readText()")
    sender.goto("about:blank")
    sender.goto(link)
    expect(prompt).to_have_value("long " * 2000)
    receiver = visits.open(tiny[0])
    own = receiver.get_by_label("Prompt", exact=True)
    own.fill("of the receiver")
    expect(receiver).to_have_url(re.compile("receiver"))
    receiver.goto("about:blank")
    receiver.goto(link)
    expect(own).to_have_value("")


def test_a_reload_in_the_middle_keeps_the_words_so_far(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    url, app = tiny
    page = visits.open(url)
    page.get_by_label("Most new tokens").fill("400")
    page.get_by_role("button", name="Generate").click()
    expect(page.locator(".text").first.locator("span").nth(5)).to_be_visible()
    page.reload()
    expect(page.locator(".answer[data-state=stopped]").first).to_contain_text("Stopped before its end")
    assert len(texts(page)[0]) > 5
    wait_for(lambda: idle(app))


def test_the_server_restarts_below_an_open_page(checkpoints: Path, tmp_path: Path, visits: Visits) -> None:
    with proxied("http://127.0.0.1:9") as proxy:
        with process(checkpoints, "cache_tokens=8192", "max_new_tokens=2000", log=tmp_path / "log") as (
            running,
            proxy.target,
        ):
            page = visits.open(proxy.url)
            page.get_by_label("Prompt", exact=True).fill("Kept")
            page.get_by_label("Most new tokens").fill("1900")
            page.get_by_role("button", name="Generate").click()
            expect(page.locator(".text span").nth(3)).to_be_visible()
            running.kill()
            expect(page.get_by_role("alert")).to_contain_text("The connection ended before the answer did.")
        expect(page.locator(".answer[data-state=stopped]").first).to_be_visible()
        page.get_by_label("Most new tokens").fill("8")
        page.get_by_role("button", name="Generate").click()
        expect(page.get_by_role("alert")).to_contain_text("The server cannot be reached.")
        expect(page.locator(".answer[data-state=stopped]")).to_have_count(4)
        with serving(checkpoints) as (proxy.target, _):
            page.get_by_role("button", name="Try again").click()
            all_done(page, 4)
            expect(page.get_by_role("alert")).to_have_count(0)
            expect(page.get_by_label("Prompt", exact=True)).to_have_value("Kept")


def test_two_browsers_at_once(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    pages = [visits.open(tiny[0]) for _ in range(2)]
    for number, page in enumerate(pages):
        page.get_by_label("Prompt", exact=True).fill(f"Browser {number}")
        page.get_by_role("button", name="Generate").click()
    for number, page in enumerate(pages):
        all_done(page, 4)
        body: dict[str, Any] = {"prompt": f"Browser {number}", "max_new_tokens": 48}
        assert texts(page)[0] == httpx.post(f"{tiny[0]}/generate", json=body).json()["results"][0]["text"]


def test_the_page_asks_for_the_key_and_keeps_it_for_the_session(checkpoints: Path, visits: Visits) -> None:
    with serving(checkpoints, api_keys="ann-key") as (url, _):
        context = visits.context()
        page = visits.open(url, context)
        expect(page.get_by_label("API key")).to_be_focused()
        page.get_by_role("button", name="Use this key").click()
        expect(page.get_by_label("API key")).to_have_accessible_description(re.compile("Enter a key.$"))
        page.get_by_label("API key").fill("ключ")
        page.get_by_role("button", name="Use this key").click()
        expect(page.get_by_text("This key is not valid")).to_be_visible()
        assert page.evaluate("sessionStorage.length") == 0
        page.get_by_label("API key").fill("wrong")
        page.get_by_role("button", name="Use this key").click()
        expect(page.get_by_text("The server does not know this key.")).to_be_visible()
        page.get_by_label("API key").fill("ann-key")
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Generate").click()
        all_done(page, 4)
        page.evaluate("sessionStorage.setItem('ropeway.key', 'revoked')")
        page.get_by_role("button", name="Generate").click()
        expect(page.get_by_role("alert")).to_contain_text("no valid API key")
        page.get_by_label("API key").fill("ann-key")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_have_count(0)
        page.get_by_role("link", name="API").click()
        expect(page.get_by_role("alert")).to_contain_text("ROPEWAY_OPEN_DOCS=true on the server opens it")
        page.reload()
        expect(page.get_by_label("Prompt", exact=True)).to_be_visible()
        assert "ann-key" not in page.url + page.evaluate("JSON.stringify(localStorage)")
        expect(visits.open(url, context).get_by_label("API key")).to_be_visible()


def test_behind_a_path_prefix(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    with proxied(tiny[0], "/a/prefix") as proxy:
        page = visits.open(f"{proxy.url}/")
        assert page.url.startswith(f"{proxy.url}/ui/")
        page.get_by_label("Most new tokens").fill("5")
        page.get_by_role("button", name="Generate").click()
        all_done(page, 4)
        assert page.get_by_role("link", name="API").evaluate("link => link.href") == f"{proxy.url}/docs"


EARLY = {
    "a part": "document.addEventListener('DOMContentLoaded', () => { location.hash = LINK; });",
    "its settings": """
        let isFollowed = false;
        new MutationObserver(() => {
          if (isFollowed || !document.querySelector('main > div')) return;
          isFollowed = true;
          location.hash = LINK;
        }).observe(document, { childList: true, subtree: true });""",
    "settings about to be written": """
        const later = setTimeout;
        window.setTimeout = (call, ms) => later(() => {
          if (ms === 250 && !location.hash.includes('gone')) location.hash = LINK;
          call();
        }, ms);""",
}


@pytest.mark.parametrize("moment", EARLY)
def test_a_link_is_followed_at_any_moment(moment: str, tiny: tuple[str, FastAPI], visits: Visits) -> None:
    page = visits.open(f"{tiny[0]}/blank", visits.context())
    page.add_init_script(EARLY[moment].replace("LINK", "'#generate?model=gone'"))
    page.goto(f"{tiny[0]}/ui/#{'jobs' if moment == 'a part' else 'generate'}")
    expect(page.get_by_role("combobox", name="Model")).to_have_value("gone")
    page.wait_for_timeout(600)  # settings are written into the address a moment later
    expect(page.get_by_role("combobox", name="Model")).to_have_value("gone")
    assert "model=gone" in page.url
