"""Generate, in a real browser: side by side, stopped, refused, in other settings."""

from __future__ import annotations

import json
import re

import httpx
import pytest
from fastapi import FastAPI

from tests.service.serving import idle, wait_for
from tests.service.ui.answers import PARTS, all_done, answers, texts
from tests.service.ui.conftest import USUAL, Visits, playwright

pytestmark = pytest.mark.slow
expect = playwright.expect


def test_encodings_answer_side_by_side(demo: tuple[str, FastAPI], visits: Visits) -> None:
    url, _ = demo
    page = visits.open(url)
    assert page.url.startswith(f"{url}/ui/")
    page.get_by_role("button", name="Generate").click()
    all_done(page, 4)
    body = {"prompt": "The import statement", "pe": ["default", "auto", "self_extend", "yarn:4"], "max_new_tokens": 48}
    expected = httpx.post(f"{url}/generate", json=body, timeout=60).json()["results"]
    assert texts(page) == [result["text"] for result in expected]
    for answer, result in zip(answers(page).all(), expected, strict=True):
        expect(answer).to_contain_text("48 tokens")
        expect(answer).to_contain_text("tokens/s")
        answer.get_by_text("Encoding in effect").click()
        value = answer.get_by_role("row", name="original_max_position_embeddings").get_by_role("cell")
        assert all(box["width"] > 90 for one in value.all() if (box := one.bounding_box())), (
            "four columns, and readable"
        )
        expect(answer.get_by_role("row", name="frequency_hash")).to_contain_text(result["pe"]["frequency_hash"])
    expect(answers(page).nth(1)).to_contain_text("Chosen by auto: rule, above 0 tokens and up to 256")


def inside(shown: playwright.Locator, top: float, bottom: float) -> bool:
    box = shown.bounding_box()
    return bool(box and box["y"] >= top and box["y"] + box["height"] <= bottom)


def test_by_keys_alone(demo: tuple[str, FastAPI], visits: Visits) -> None:
    page = visits.open(demo[0])
    page.get_by_label("Prompt", exact=True).focus()
    page.keyboard.press("Control+A")
    page.keyboard.type("She was")
    page.keyboard.press("Control+Enter")
    all_done(page, 4)
    page.get_by_role("group", name="Answer under default").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    alternatives = page.locator(".alternatives")
    expect(alternatives.get_by_role("row")).to_have_count(5)
    body = {"prompt": "She was", "max_new_tokens": 2, "logprobs": 1}
    second = httpx.post(f"{demo[0]}/generate", json=body, timeout=60).json()["results"][0]["logprobs"][1]
    expect(alternatives).to_contain_text(f"log-probability {second['logprob']:.2f}")
    page.keyboard.press("Escape")
    expect(alternatives).to_have_count(0)
    word = page.locator(".text").nth(1).locator("span").nth(4)
    word.hover()
    expect(alternatives).to_contain_text("chosen")
    page.locator("main").evaluate("main => main.style.paddingTop = '600px'")
    word.evaluate("word => scrollTo(0, scrollY + word.getBoundingClientRect().bottom - innerHeight + 20)")
    word.hover()
    assert inside(alternatives, 0, USUAL["height"])


def stream_of(*texts: str) -> str:
    """A streamed answer with a token for each text."""
    logprob = {"token_id": 7, "logprob": -1, "top": []}
    events = [{"index": 0, "text": text, "token_ids": [7], "logprobs": [{**logprob, "token": text}]} for text in texts]
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def test_a_tap_shows_the_alternatives_of_a_line_feed(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    page = visits.open(tiny[0], visits.context(has_touch=True))
    stream = stream_of("One", "\n", "two")
    page.route("**/generate", lambda route: route.fulfill(content_type="text/event-stream", body=stream))
    page.get_by_role("button", name="Generate").click()
    word = page.locator(".text").first.locator("span").nth(1)
    word.tap()
    page.wait_for_timeout(100)  # a tap ends with the pointer outside
    expect(page.locator(".alternatives")).to_contain_text("⏎")
    assert texts(page)[0] == "One\ntwo", "a mark is no text"
    page.get_by_label("Prompt", exact=True).tap()
    expect(page.locator(".alternatives")).to_have_count(0)


HEBREW = "שלום"


def test_each_line_begins_where_its_script_does(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    page = visits.open(tiny[0])
    stream = stream_of(HEBREW, "\n", "two")
    page.route("**/generate", lambda route: route.fulfill(content_type="text/event-stream", body=stream))
    prompt = page.get_by_label("Prompt", exact=True)
    expect(prompt).to_have_css("direction", "ltr")
    prompt.fill(HEBREW)
    expect(prompt).to_have_css("direction", "rtl")
    page.get_by_role("button", name="Generate").click()
    answer = page.locator(".text").first
    expect(answer.locator("span")).to_have_count(3)
    around, hebrew, english = (
        found.bounding_box() or {} for found in (answer, *(answer.locator("span").nth(at) for at in (0, 2)))
    )
    assert around["x"] + around["width"] - hebrew["x"] - hebrew["width"] < 20
    assert english["x"] - around["x"] < 20


def test_the_end_of_the_trained_length_is_marked(demo: tuple[str, FastAPI], visits: Visits) -> None:
    page = visits.open(demo[0])
    prompt = "The import statement. " * 30
    page.get_by_label("Prompt", exact=True).fill(prompt)
    length = httpx.post(f"{demo[0]}/tokenize", json={"prompt": prompt}, timeout=60).json()["count"]
    assert 256 - 48 < length < 256
    expect(page.get_by_text(f"{length} tokens; the model was trained on 256")).to_be_visible()
    page.get_by_role("button", name="Generate").click()
    all_done(page, 4)
    before = (
        page.locator(".text")
        .first.locator(".trained-end")
        .evaluate("mark => { let words = 0; while (mark = mark.previousElementSibling) words++; return words }")
    )
    assert before == 256 - length, "each token of the demo model's text is one word here"
    page.get_by_role("button", name="A passkey beyond the trained length").click()
    expect(page.get_by_text("times the trained length")).to_be_visible()
    page.get_by_role("button", name="Generate").click()
    expect(answers(page).first).to_contain_text("tokens beyond the trained length of 256")
    all_done(page, 4)
    assert [" 48213" in text for text in texts(page)] == [False, True, True, True]


def test_the_only_model_is_named_and_a_full_row_says_so(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    only = httpx.get(f"{tiny[0]}/models").json()["models"][:1]
    page = visits.open(f"{tiny[0]}/blank")
    page.route("**/models", lambda route: route.fulfill(json={"models": only}))
    for part in PARTS:
        page.goto(f"{tiny[0]}/ui/#{part}")
        expect(page.get_by_role("textbox", name="Model", exact=True).locator("visible=true")).to_have_value(
            only[0]["id"]
        )
    page.goto(f"{tiny[0]}/ui/#generate")
    expect(page.get_by_role("button", name="Add an encoding")).to_be_disabled()
    expect(page.get_by_text("At most four side by side: remove one to add another.")).to_be_visible()
    page.get_by_role("button", name="Remove encoding 4").click()
    expect(page.get_by_role("button", name="Add an encoding")).to_be_enabled()
    expect(page.get_by_label("Encoding 3", exact=True)).to_be_focused()
    page.get_by_role("button", name="Add an encoding").press("Enter")
    expect(page.get_by_label("Encoding 4", exact=True)).to_be_focused()
    page.get_by_role("button", name="Remove encoding 1").press("Enter")
    expect(page.get_by_label("Encoding 1", exact=True)).to_be_focused()


DOUBLE_CLICK_MS = 550
"""A little more than the page's: until then, "Stop" does nothing."""


def test_stop(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    url, app = tiny
    page = visits.open(url)
    page.get_by_label("Most new tokens").fill("1500")
    page.get_by_role("button", name="Generate").click()
    expect(page.locator(".text span").nth(3)).to_be_visible()
    page.wait_for_timeout(DOUBLE_CLICK_MS)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".answer[data-state=stopped]").first).to_contain_text("Stopped before its end")
    expect(page.get_by_role("button", name="Generate")).to_be_visible()
    wait_for(lambda: idle(app))
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_double_click_starts_and_does_not_stop(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    page = visits.open(tiny[0])
    page.get_by_label("Most new tokens").fill("200")
    page.get_by_role("button", name="Generate").dblclick()
    all_done(page, 4)


def test_a_run_that_is_stopped_before_its_first_token_says_so(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    page = visits.open(tiny[0])
    page.get_by_label("Most new tokens").fill("2")
    page.route("**/generate", lambda route: None)
    for columns in ("stopped", "done"):  # without earlier answers, then with some
        page.get_by_role("button", name="Generate").click()
        page.wait_for_timeout(DOUBLE_CLICK_MS)
        page.get_by_role("button", name="Stop").click()
        expect(page.locator(".actions").get_by_role("status")).to_have_text("Stopped before the first token")
        expect(page.locator(f".answer[data-state={columns}]")).to_have_count(4)
        expect(page.get_by_role("alert")).to_have_count(0)
        page.unroute("**/generate")
        page.get_by_role("button", name="Generate").click()
        all_done(page, 4)
        page.route("**/generate", lambda route: None)


def test_errors_are_beside_the_control(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    page = visits.open(tiny[0])
    page.get_by_label("Encoding 2", exact=True).fill("yarn:0.1")
    page.get_by_label("Encoding 4", exact=True).fill("yarm")
    page.get_by_label("Temperature").fill("200")
    page.get_by_label("Most new tokens").fill("many")
    page.get_by_role("button", name="Generate").click()
    for label, error in (
        ("Encoding 2", "factor: must be at least 1, not 0.1"),
        ("Encoding 4", "unknown method 'yarm': did you mean yarn?"),
        ("Temperature", "must be at most 100, not 200"),
        ("Most new tokens", "must be a whole number, not 'many'"),
    ):
        control = page.get_by_label(label, exact=True)
        expect(control).to_have_accessible_description(re.compile(re.escape(error) + "$"))
        assert control.get_attribute("aria-invalid") == "true"
    expect(page.get_by_label("Encoding 2", exact=True)).to_be_focused()
    expect(page.get_by_label("Encoding 1", exact=True)).to_have_accessible_description("")
    page.get_by_role("button", name="Remove encoding 1").click()
    expect(page.get_by_label("Encoding 1", exact=True)).to_have_accessible_description(re.compile("^factor: must"))
    expect(page.get_by_label("Encoding 2", exact=True)).to_have_accessible_description("")
    page.get_by_label("Encoding 1", exact=True).fill("yarn:2")
    expect(page.get_by_label("Encoding 1", exact=True)).to_have_accessible_description("")
    expect(answers(page)).to_have_count(0)


def test_a_seed_that_would_be_rounded_is_refused(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    page = visits.open(tiny[0])
    seed = page.get_by_label("Seed")
    seed.fill("9007199254740993")
    page.get_by_role("button", name="Generate").click()
    expect(seed).to_have_accessible_description(
        "must be at most 9,007,199,254,740,991 on this page, not 9007199254740993"
    )
    expect(seed).to_be_focused()
    expect(answers(page)).to_have_count(0)


def test_a_refusal_keeps_the_answers(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    page = visits.open(tiny[0])
    page.get_by_label("Most new tokens").fill("4")
    page.get_by_label("Seed").fill("1,234")
    page.get_by_role("button", name="Generate").click()
    all_done(page, 4)
    before = texts(page)
    page.get_by_label("Temperature").fill("0,7")
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_label("Temperature")).to_have_accessible_description(re.compile("a number, not '0,7'"))
    assert texts(page) == before
    shown = page.get_by_role("region", name="Answers")
    expect(shown.get_by_role("status").first).to_have_text("These answers are of other settings: temperature 0")
    page.get_by_label("Temperature").fill("0")
    page.get_by_role("button", name="Generate").click()
    expect(shown).to_have_class("")
    all_done(page, 4)
    page.get_by_label("Encoding 3", exact=True).fill("yarn")
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_label("Encoding 3", exact=True)).to_have_accessible_description(re.compile("^factor: required"))
    page.reload()
    all_done(page, 4)
    assert texts(page) == before


def test_answers_of_other_settings_say_so(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    page = visits.open(f"{tiny[0]}/ui/#generate?prompt=The+import&pe[]=yarn:4&pe[]=default&max_new_tokens=3")
    page.get_by_role("button", name="Generate").click()
    all_done(page, 2)
    shown = page.get_by_role("region", name="Answers")
    expect(shown).to_have_class("")
    page.goto(f"{tiny[0]}/ui/#generate?prompt=Once+upon+a+time&pe[]=self_extend&max_new_tokens=3&seed=7")
    note = page.get_by_text("These answers are of other settings: ")
    expect(note).to_contain_text("prompt “The import”; encodings yarn:4 default; seed not set")
    expect(shown).to_have_class("stale")
    page.get_by_role("button", name="Generate").click()
    all_done(page, 1)
    expect(note).to_have_count(0)
    page.get_by_label("Prompt", exact=True).press_sequentially("!")
    expect(note).to_contain_text("prompt “Once upon a time”")
    page.get_by_label("Prompt", exact=True).press("Backspace")
    expect(note).to_have_count(0)


def test_more_than_four_encodings_of_a_link_are_refused(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    page = visits.open(f"{tiny[0]}/ui/#generate?" + "&".join(f"pe[]=yarn:{factor}" for factor in range(2, 8)))
    fifth = page.get_by_label("Encoding 5", exact=True)
    expect(fifth).to_have_accessible_description("At most four side by side: remove this one or another.")
    page.get_by_role("button", name="Generate").click()
    expect(fifth).to_be_focused()
    expect(answers(page)).to_have_count(0)
    for _ in range(2):
        page.get_by_role("button", name="Remove encoding 1").click()
    page.get_by_role("button", name="Generate").click()
    all_done(page, 4)


def test_an_error_goes_once_its_field_is_corrected(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    page = visits.open(tiny[0])
    temperature, seed = page.get_by_label("Temperature"), page.get_by_label("Seed")
    temperature.fill("0,7")
    page.get_by_role("button", name="Generate").click()
    expect(temperature).to_have_accessible_description(re.compile("a number, not '0,7'"))
    temperature.fill("0.7")
    expect(temperature).to_have_accessible_description("0 takes the most likely token")
    expect(temperature).to_have_attribute("aria-invalid", "false")
    seed.fill("99999999999999999999")
    page.get_by_role("button", name="Generate").click()
    expect(seed).to_be_focused()


def test_a_prompt_that_is_too_long_fits_with_fewer_new_tokens(tiny: tuple[str, FastAPI], visits: Visits) -> None:
    page = visits.open(tiny[0])
    prompt, most = page.get_by_label("Prompt", exact=True), page.get_by_label("Most new tokens")
    prompt.fill("word " * 300)
    most.fill("1999")
    page.get_by_role("button", name="Generate").click()
    expect(prompt).to_have_attribute("aria-invalid", "true")
    most.fill("8")
    expect(prompt).to_have_attribute("aria-invalid", "false")
