"""Encodings, in a real browser: questions, sliders, two methods drawn over each other, links to Generate."""

from __future__ import annotations

import re

import httpx
import pytest
from fastapi import FastAPI

from patches import METHODS
from patches.registry import QUESTIONS
from patches.shorthand import LISTED_BY, ONE
from service.api.encodings.figures import MOST
from tests.conftest import ROOT
from tests.service.serving import wait_for
from tests.service.ui.conftest import Visits, playwright

pytestmark = pytest.mark.slow
expect = playwright.expect


def drawn(page: playwright.Page, *titles: str) -> None:
    """Wait until the figures are those with ``titles``, each drawn."""
    expect(page.locator(".figures h3")).to_have_text(titles)
    expect(page.locator(".figures .main-svg").first).to_be_visible()


def lines(page: playwright.Page, figure: int) -> list[str]:
    """Names of the lines that Plotly drew in a figure."""
    names: list[str] = (
        page.locator(".figures .drawing").nth(figure).evaluate("div => (div.data ?? []).map(line => line.name)")
    )
    return names


YARN = [
    "Wavelengths before and after",
    "Similarity of a query and an equal key",
    "Rotation of one query: yarn(factor=4)",
]
LAST = "Sinusoidal position vectors"


def test_a_method_is_drawn_on_the_loaded_model(small: tuple[str, FastAPI], visits: Visits) -> None:
    url, _ = small
    page = visits.open(url)
    page.get_by_role("link", name="Encodings").click()
    drawn(page, *YARN, LAST)
    assert lines(page, 0) == ["before", "yarn(factor=4)"]
    page.get_by_role("textbox", name="factor", exact=True).fill("8")
    drawn(page, *YARN[:2], "Rotation of one query: yarn(factor=8)", LAST)
    page.get_by_role("slider", name="factor, slider").first.press("End")
    expect(page.get_by_role("textbox", name="factor", exact=True)).to_have_value("4096")
    page.get_by_role("textbox", name="factor", exact=True).fill("0.5")
    factor = page.get_by_role("textbox", name="factor", exact=True)
    expect(factor).to_have_accessible_description(
        "Target length divided by the trained length; the model's own ratio "
        "when it declares one. From 1 to 4,096. must be at least 1, not 0.5"
    )
    factor.fill("2,5")
    expect(factor).to_have_accessible_description(re.compile("must be a number, not '2,5'$"))
    page.route("**/figures", lambda route: None)
    factor.fill("2.5")
    expect(factor).to_have_accessible_description(re.compile("From 1 to 4,096.$"))
    expect(page.get_by_role("link", name="arXiv:2309.00071").first).to_be_visible()
    expect(page.get_by_label("attention_factor, slider").first).not_to_have_attribute("aria-valuetext", "none")
    expect(page.get_by_label("mscale, slider").first).to_have_attribute("aria-valuetext", "none")
    expect(page.get_by_text("Not set: move the slider to set it.").first).to_be_attached()


def test_a_method_that_the_model_refuses_shows_why(small: tuple[str, FastAPI], visits: Visits) -> None:
    page = visits.open(f"{small[0]}/ui/#encodings")
    drawn(page, *YARN, LAST)
    expect(page).to_have_title("Encodings · Ropeway")
    method = page.get_by_role("combobox", name="Method", exact=True)
    method.select_option("learned")
    expect(method).to_have_accessible_description(re.compile("learned is for models trained with learned positions"))
    expect(page.locator(".stale .figures")).to_be_visible()
    method.select_option("linear")
    expect(page.locator(".figures h3").nth(2)).to_contain_text("linear")
    expect(page.locator(".stale")).to_have_count(0)


def test_a_link_after_a_reload_has_its_own_encodings(small: tuple[str, FastAPI], visits: Visits) -> None:
    page = visits.open(f"{small[0]}/ui/#generate")
    expect(page.get_by_label("Encoding 4", exact=True)).to_be_visible()
    page.get_by_role("link", name="Encodings", exact=True).click()
    page.reload()
    page.get_by_role("link", name="Generate with it").click()
    expect(page.get_by_label("Encoding 2", exact=True)).to_have_value("yarn:factor=4")
    expect(page.get_by_label("Encoding 3", exact=True)).to_have_count(0)


def test_an_unknown_method_leads_to_the_list_of_the_page(small: tuple[str, FastAPI], visits: Visits) -> None:
    page = visits.open(f"{small[0]}/ui/#generate?pe[]=zzzz")
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_label("Encoding 1", exact=True)).to_have_accessible_description(re.compile("see Encodings$"))
    page.locator(".error").get_by_role("link", name="Encodings").click()
    expect(page).to_have_url(re.compile("#encodings.*method=yarn"))  # written once the part listens to the address
    page.goto(f"{small[0]}/ui/#encodings?method=zzzz")
    method = page.get_by_role("combobox", name="Method", exact=True)
    expect(method).to_have_accessible_description(re.compile("unknown method 'zzzz'.*: choose one of this list$"))
    expect(method).to_have_value("zzzz")
    page.reload()
    expect(page.get_by_text("The figures come once the error is mended.")).to_be_visible()
    method.select_option("linear")
    expect(page.locator(".figures h3").nth(2)).to_contain_text("linear")


def test_the_words_for_the_list_of_methods_are_the_servers() -> None:
    source = (ROOT / "service/ui/source/src/controls.tsx").read_text()
    assert re.findall(r'LISTED_BY = "(.*)";', source) == [LISTED_BY]
    (several,) = re.findall(r'GIVE_SEVERAL = "(.*)";', source)
    assert ONE.endswith(f"; {several}")


def test_two_methods_over_each_other(small: tuple[str, FastAPI], visits: Visits) -> None:
    page = visits.open(f"{small[0]}/ui/#encodings")
    page.get_by_label("Compared with").get_by_role("combobox", name="Compared with").select_option("self_extend")
    expect(page.locator(".figures h3").nth(1)).to_have_text("Effective distance at 1,024 tokens: self_extend")
    wait_for(lambda: lines(page, 0) == ["before", "yarn(factor=4)", "self_extend"])
    page.get_by_label("Length of the text, tokens").fill("512")
    expect(page.locator(".figures h3").nth(1)).to_have_text("Effective distance at 512 tokens: self_extend")
    other = visits.open(page.url)
    expect(other.locator(".figures h3").nth(1)).to_have_text("Effective distance at 512 tokens: self_extend")
    page.get_by_role("combobox", name="Model").select_option("ropeway-demo-alibi")
    page.get_by_role("link", name="Generate with it").click()
    expect(page.get_by_role("combobox", name="Model")).to_have_value("ropeway-demo-alibi")
    for number, text in enumerate(("default", "yarn:factor=4", "self_extend"), start=1):
        expect(page.get_by_label(f"Encoding {number}", exact=True)).to_have_value(text)
    expect(page.get_by_label("Prompt", exact=True)).to_have_value("The import statement")


def test_a_question_leaves_the_methods_that_answer_it(small: tuple[str, FastAPI], visits: Visits) -> None:
    page = visits.open(f"{small[0]}/ui/#encodings")
    page.get_by_role("button", name="constant memory").click()
    options = page.get_by_role("combobox", name="Method", exact=True).locator("option")
    expect(options).to_have_text(["yarn", "lm_infinite", "streaming"])
    page.get_by_role("combobox", name="Method", exact=True).select_option("streaming")
    expect(page.locator(".figures h3").nth(1)).to_contain_text("streaming")
    page.get_by_role("button", name="trained without rotation").click()
    page.get_by_role("combobox", name="Method", exact=True).select_option("alibi")
    expect(page.locator(".figures h3").first).to_have_text("Bias: alibi")


def test_dark_figures_are_dark(small: tuple[str, FastAPI], visits: Visits) -> None:
    page = visits.open(f"{small[0]}/ui/#encodings")
    drawn(page, *YARN, LAST)
    colour = "div => div.layout.paper_bgcolor ?? div.layout.template.layout.paper_bgcolor"
    assert page.locator(".figures .drawing").first.evaluate(colour) == "white"
    page.get_by_label("Theme").select_option("dark")
    expect(page.locator(".figures .main-svg").first).to_have_css("background-color", "rgb(24, 24, 24)")
    assert page.locator(".figures .drawing").first.evaluate(colour) == "#181818"
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


def test_questions_name_methods_that_the_readme_names() -> None:
    named = {name for names in QUESTIONS.values() for name in names}
    assert named <= set(METHODS)
    table = (ROOT / "README.md").read_text().partition("## Which method?")[2].partition("\n## ")[0]
    assert {name for name in METHODS if f"[`{name}`]" in table} - {"default"} <= named


def test_every_method_has_figures_or_an_error_of_its_field(client: httpx.Client) -> None:
    """Several methods share a request, and so the figures that they share; a refused one leaves it."""
    left, drawn = list(METHODS), set()
    while left:
        some = left[:MOST]
        answer = client.post("/figures", json={"pe": some}, timeout=60)
        if answer.status_code != 200:
            (refused,) = re.findall(r"^pe\.(\d+)", answer.json()["error"]["param"])
            del left[int(refused)]
            continue
        body = answer.json()
        assert [one["pe"]["method"] for one in body["encodings"]] == some
        assert {figure["name"] for figure in body["figures"]} >= {"sinusoids"}
        for figure in body["figures"]:
            assert figure["data"], some
            assert figure["wide"]["height"] > 100
        drawn.update(some)
        del left[:MOST]
    assert drawn >= {"default", "dynamic", "self_extend", "alibi"}
