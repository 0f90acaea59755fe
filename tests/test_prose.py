"""Docstrings, comments and pages are plain English: no sentence opens with a what clause, is long or is coy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.prose import fault, faults, sentences

WRITTEN = ("benchmarks", "docs", "patches", "service", "tests")
GENERATED = {"service/models/demo"}
"""Pages whose sentences are those of the code that writes them."""


@pytest.mark.parametrize(
    ("sentence", "found"),
    [
        ("What is told of a job.", "opens with a what clause"),
        ("Who waits?", None),
        ("The server tells the client.", "says 'tells'"),
        ("A process of its own.", "says 'of its own'"),
        ("word " * 31, "has 31 words"),
        ("Job status returned to clients.", None),
    ],
)
def test_the_reading_itself(sentence: str, found: str | None) -> None:
    assert fault(sentence) == found


def test_sentences_end_at_full_stops_list_items_and_cells() -> None:
    text = "One, see Eq. 3. Two `a. B` three.\n\n- Four\n- Five | Six"
    assert list(sentences(text)) == ["One, see Eq 3.", "Two CODE three.", "- Four", "Five", "Six"]


@pytest.mark.parametrize("folder", [*WRITTEN, "."])
def test_prose_is_plain(folder: str) -> None:
    """The root's own pages are those beside the folders."""
    paths = (ROOT / folder).glob("*.md") if folder == "." else (ROOT / folder).rglob("*")
    kept = [path for path in sorted(paths) if path.suffix in (".py", ".md") and not is_generated(path)]
    assert kept
    found = [line for path in kept for line in faults(path)]
    assert found == [], f"{len(found)} sentences"


def is_generated(path: Path) -> bool:
    return path.relative_to(ROOT).as_posix().startswith(tuple(GENERATED))
