"""Docstrings, comments, messages and pages are plain English: no sentence opens with a what clause, is long or coy."""

from __future__ import annotations

import pytest

from tests.conftest import ROOT
from tests.prose import configuration, fault, faults, prose, sentences, strings

WRITTEN = ("benchmarks", "docs", "patches", "service", "tests")
CONFIGURATION = (
    *("Makefile", "Dockerfile", "docker-compose.yml", "pyproject.toml", ".env.example", ".ci/run"),
    *(".github/workflows/ci.yml", ".pre-commit-config.yaml", "service/monitoring/alerts.yml"),
)


@pytest.mark.parametrize(
    ("sentence", "found"),
    [
        ("What is told of a job.", "opens with a what clause"),
        ("Who waits?", None),
        ("The server tells the client.", "says 'tells'"),
        ("A process of its own.", "says 'of its own'"),
        ("word " * 21, "has 21 words"),
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
    written = [path for path in sorted(paths) if path.suffix in (".py", ".md")]
    assert written
    found = [line for path in written for line in faults(path, prose(path))]
    assert found == [], f"{len(found)} sentences"


@pytest.mark.parametrize("folder", ["benchmarks", "patches", "service"])
def test_messages_are_plain(folder: str) -> None:
    found = [line for path in sorted((ROOT / folder).rglob("*.py")) for line in faults(path, strings(path))]
    assert found == [], f"{len(found)} sentences"


@pytest.mark.parametrize("name", CONFIGURATION)
def test_comments_of_configuration_are_plain(name: str) -> None:
    assert list(faults(ROOT / name, configuration(ROOT / name))) == []
