"""Links of every page lead to files and headings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.service.docs.terminal import pages

LINK = re.compile(r"\]\((?!https?://|mailto:)([^()\s#]*)(?:#([^()\s]*))?\)")


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of the headings of a page."""
    without_code = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", without_code, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*pages(), ROOT / "DESIGN.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for file, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        target = page.parent / file if file else page
        assert target.exists(), f"{page.name}: {file}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.name}: {file}#{anchor}"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    linked = {file for file, _ in LINK.findall(index)}
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"} <= linked


def test_the_reading_itself() -> None:
    assert LINK.findall("[a](b.md#c), [d](#e), ![f](g/h.svg) and [i](https://j.k)") == [
        ("b.md", "c"),
        ("", "e"),
        ("g/h.svg", ""),
    ]
