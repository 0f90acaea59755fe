"""The documents that need no upload: the same on every machine, and unknown to the demo models."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from service.evaluation.catalogue import EVALUATIONS
from service.evaluation.documents import BUILT_IN, DEFAULT_DOCUMENT

WORDS = 8
"""Words in a row: shorter runs are stock phrases."""


def grams(text: str, step: int = 1) -> set[tuple[str, ...]]:
    """Runs of words that begin at every ``step``-th word."""
    words = re.findall(r"[a-z']+", text.lower())
    return {tuple(words[at : at + WORDS]) for at in range(0, len(words) - WORDS + 1, step)}


def test_the_default_document_is_the_same_bytes_everywhere() -> None:
    text = BUILT_IN[DEFAULT_DOCUMENT]().encode()
    assert hashlib.sha256(text).hexdigest() == "8061549557aebd2fd6e353d18d9197cb707029112bd52d4d8b174583a925848a"
    assert len(text) == 466_854


@pytest.mark.parametrize("name", [name for name in EVALUATIONS if name not in ("passkey", "sweep")])
def test_every_evaluation_with_documents_reads_it_by_default(name: str) -> None:
    assert EVALUATIONS[name].request().texts() == [DEFAULT_DOCUMENT]
    assert EVALUATIONS[name].request.example()["input"] == DEFAULT_DOCUMENT


@pytest.mark.slow
def test_no_training_text_of_the_demo_models_has_it(shared: Path) -> None:
    """The runs of a training text do not overlap: a copied passage still has one run for every eight words."""
    known = grams(BUILT_IN[DEFAULT_DOCUMENT]())
    seen: set[tuple[str, ...]] = set()
    for path in sorted((shared / "data/corpora/train").glob("*.txt")):
        seen |= grams(path.read_text(encoding="utf-8", errors="replace"), WORDS) & known
    assert len(known) > 80_000
    assert len(seen) < 0.001 * len(known) / WORDS
